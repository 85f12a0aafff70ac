"""Compares an answer with the truth: 1/2, 0.5, \\frac{1}{2} and \\boxed{50\\%} are the same.

A truth is a choice, words, or mathematics; choices, words and boxes are compared whole. A
comparison that takes too long is cut off: in the main thread of a process, where the reward
functions of a run are called, by a signal; in any other thread, such as a step of an agent, it is
made in a worker of a FunctionPool, which is killed.
"""

import re
import signal
import threading
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

from openrlhf.errors import RewardError
from openrlhf.rewards.base import RewardBatch
from openrlhf.rewards.math_expressions import (
    QUANTITIES,
    UNIT_WORDS,
    load_grammar,
    same_mathematics,
)
from openrlhf.rewards.workers import FunctionPool
from openrlhf.utils.math_utils import DOUBT, FUNCTIONS, final_answers, plain_math

LIMIT_S = 5.0  # of a comparison
POOL_TIMEOUT_S = 30.0  # of a comparison for a thread
MAX_ANSWER = 500  # characters
# The pronoun and the article are no choices: "I choose A", "A good guess".
LETTER = re.compile(
    r"(?<![A-Za-z\\{^_+*/=|-])(?!(?:I|A) (?!is\b|and\b|or\b|because\b)[a-z])"
    r"([A-J])(?![A-Za-z'^_]|\s*[+*/=|])"
)
LETTERS = re.compile(
    r"[^\w!¬]*\(?[A-J]\)?(?:(?:\s*[,&]\s*(?:and\s+)?|\s+and\s+)\(?[A-J]\)?)*[^\w'^]*|(?=..)A?B?C?D?E?F?G?H?I?J?"
)
LABELLED = re.compile(
    r"\W*(?:(?i:option|choice|answer)\W+)?\(?([A-J])(?:\s*[).:]|\s+(?=[\d$]|\\frac|\\sqrt))(.+)"
)
NAME = re.compile(r"(?:[A-Z]\. ){2,}[A-Z][a-z]|(?:[A-Z]\.){2,} ?[A-Z][a-z]")  # J. K. Rowling
INITIALS = re.compile(r"\b(?:[A-Z]\.\s*)+(?=[A-Za-z][a-z])")
LAST_LABEL = "E"  # of most lists of choices
VERDICT = re.compile(r"\b(?:is|the|right|correct|true|best|answer|choice|option)\b")
DENIED = re.compile(
    rf"(?:(?:\bI (?:can )?)?(?:{DOUBT}|\brul(?:e|ed|es) out\b"
    r"|\bdiffer(?:s|ent) from(?=\s*\(?(?:(?-i:[A-J])\b|\$?-?\d))"
    r"|\b(?:eliminate|exclude|reject|discard)s? (?:option |choice )?(?=\(?[A-J]\b))"
    r"|\b(?:not|cannot|never|except|neither)\b|n['’]t\b|\b(?:rather|other) than\b|\binstead of\b"
    r"|\bnicht\b|\bkeine?\b|\bpas\b|\bno es\b|\bnon è\b|\bне\b"
    r"|不是|(?:[^\s,;]+\s*)?\\ne(?![A-Za-z])|\\(?:neg|lnot|not)(?![A-Za-z])"
    r"|^\W*\\sim(?![A-Za-z])|¬|(?<![\w)])!(?=\(?(?-i:[A-J])\b))"
    r".*?(?=\b(?:but|mais|sondern|sino)\b|[,;]|\.(?!\d)|$)",
    re.IGNORECASE,
)
WRONG = re.compile(
    r"\b(?:wrong|incorrect)\b|\b(?:is|are) (?:\w+ )?(?:false|impossible)\s*(?:[.,;]|$)"
    r"|\bbe (?:ruled out|eliminated|excluded)\b"
    r"|错|(?:では|じゃ)(?:な|あり)|아니|아닙|ليس",
    re.IGNORECASE,
)
ALL_BUT = re.compile(
    r"\b(?i:(?:all|any\w*|every\w*) but|no|without"
    r"|(?:none|half|opposite|complement) of) \(?[A-J](?!\w)"
)
CONJUNCTION = "as|because|while|but|since|whereas"
CANDIDATE = r"(?:\(?(?-i:[A-J])\)?(?!\w)|-?\$?\d(?:[\d.,/]*\d)?)"
# Said of other candidates than the answer: B; A is wrong.
REFUTED = re.compile(
    rf"(?:^|;|,?\s*\b(?:{CONJUNCTION})\b|,(?=[^,;]*\b(?:is|was|would)\b))"
    rf"\s*(?:(?:and|{CONJUNCTION})\s+)?"
    r"(?:(?:the\s+)?(?:option|choice|answer|case|value)s?\s+)?(?:[a-z]\s*=\s*)?"
    rf"(?P<named>{CANDIDATE}(?:(?:,\s*|\s+)(?:(?:and|or)\s+)?{CANDIDATE})*)"
    r"\s+(?:is|are|was|were|(?:would|must|can|could) be)\s+(?:an?\s+)?(?:(?!not\b)\w+\s+)?"
    r"(?:wrong|incorrect|false|impossible|mistakes?|ruled out|eliminated|excluded)\s*(?=[.;,]|$)",
    re.IGNORECASE,
)
NOT_RIGHT = re.compile(
    r"(?:\bcannot be|\bnot|n['’]t)(?: the)? (?:correct|right)(?: (?:answer|choice|option|one))?\s*"
    r"(?=[.;,]|$)",
    re.IGNORECASE,
)
# The choices in Between A and B, I choose B; a remark that names none.
MENTIONED = re.compile(
    r"^\W*(?:between|(?:out )?of|among)(?:(?:,| and| or)*\s*\(?(?-i:[A-J])\)?(?!\w))+\s*,"
    r"|\(see [^()]*\)",
    re.IGNORECASE,
)
REASON = re.compile(
    r",?\s*\b(?:because|since|where|which(?!(?: \w+){1,2} (?:wrong|incorrect|false)\s*(?:[.;,]|$))"
    r"|as (?:statement|option|choice|it|this|that)"
    r"|if|when|given|whether)\b.*",
    re.IGNORECASE,
)
PREMISE = re.compile(r"^(?:since|because|given)\b[^,]*,(?!\d{3})", re.IGNORECASE)
HEDGE = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|either|oder|ou|или)\b|或|または|또는", re.IGNORECASE
)
VERB = re.compile(
    r".*(?:\b(?:is|are|was|be|equals|choose|pick|so|thus|hence|therefore)\b|[:=]),?", re.IGNORECASE
)
AGENT = re.compile(r"^[a-z]+(?:ed|en|wn|nd) (?:by|in) (?=[A-Z])")  # written by Jane Austen
YES_OR_NO = re.compile(r"\b(?:yes|no|true|false)\b", re.IGNORECASE)
# Not "no idea" or "no one knows".
SAYS_YES_OR_NO = re.compile(
    r"yes\b|(?:no|true|false)(?:\s*(?:[.,;:!—-]|$)"
    r"|\s+(?:it|they|he|she|we|there|this|that|the|because)\b)",
    re.IGNORECASE,
)
ITEM_END = re.compile(r",\s*and\b|,|&|\band\b")
INITIAL = re.compile(r"\b([a-z])\.\s*(?=[a-z]\b)")
TRIVIA = re.compile(r"\b(?:the|an?) |[$\"'“”‘’().!?*{}]")
PROSE = re.compile(
    rf"(?<![\\A-Za-z{{\d])(?!(?:{FUNCTIONS}|and|or)(?![A-Za-z]))[A-Za-z]{{2,}}['’]?[a-z]*(?:\^\{{?\d\}}?)?"
    r"|[=-]>|[→⇒∴•]|\\(?:implies|to|Rightarrow|rightarrow|therefore)(?![A-Za-z])"
    r"|(?<!\S)(?:[aAI](?= [A-Za-z]{2})|I'[a-z]+)|(?:(?=[\u00c0-\u024f\u0400-\uffff])[^\W\d_])+"
    r"|[?\"“”]|:(?!\d)|\.(?!\d|\\(?:overline|bar|dot)(?![a-z]))"
)
DELIMITER = re.compile(r"(?<!\\)\\[()]")  # \( and \)
MATH = re.compile(r"\$([^$]+)\$(?!\.?\d)")  # not 5 dollars
# What is no prose there: products of variables, a ratio.
LETTER_PRODUCT = r"(?!by)(?:[a-dghxyz]{2,}|[b-df-hj-np-tv-z]{2,}|[A-Z]{2,})"
IN_MATH = re.compile(rf"{LETTER_PRODUCT}(?:\^\{{?\d\}}?)?|(?<=\d):|(?<=\d ):")
UNIT_AFTER = re.compile(
    rf"\s*(?:(?:{UNIT_WORDS})s?(?:\s*\^\s*\{{?\d\}}?)?(?:\s*/\s*[a-z]+|\s+per\s+[a-z]+)?|[ap]m)(?![A-Za-z])",
    re.IGNORECASE,
)
# An answer of several parts: 12 apples and 5 pears alone, 1 hour and 30 minutes anywhere.
PARTS = re.compile(
    rf"(?:^\s*\d[\d.,]*\s*[a-z]+(?:,\s*\d[\d.,]*\s*[a-z]+)*,?\s+and\s+\d[\d.,]*\s*[a-z]+"
    rf"|\b\d[\d.,]*\s*(?:{UNIT_WORDS})s?\s+and\s+\d[\d.,]*\s*(?:{UNIT_WORDS})s?(?![a-z]))(?!.*\d)",
    re.IGNORECASE,
)
BOUND = re.compile(
    r"\b(?:than|at (?:most|least)|between(?: [\d.,$]+ to)?|up to|far from"
    r"|below|above|under|over|twice|double|triple"
    r"|(?:half|third|quarter|one|two|three|some|most|none|rest|root|square|cube"
    r"|power|reciprocal|inverse|opposite|logarithm|factorial)"
    r"\s+of(?:\s+(?:the|her|his|its|their))?)\s*$",
    re.IGNORECASE,
)
BOUND_AFTER = re.compile(r"\s*(?:at (?:most|least)|a (?:half|third|quarter))\b", re.IGNORECASE)
# Between a value and one that only explains it: 18 dollars for 3 shirts, 5 (see step 2).
ASIDE = re.compile(
    r"\s*(?:[a-z]+\s+)?(?:(?:in )?total\s+)?(?:for|in|at|after|from|with|per|on|by|when|over)"
    r"(?:\s+(?:the|all|each|every))?\s*",
    re.IGNORECASE,
)
# An only value, what it counts, and how it comes about: 12 cows (20 - 8 = 12), 12 (3 per child).
EXPLAINED = re.compile(
    r"(?!.*\b(?:by|with|from|than|half|third|quarter|her|his|their)\b.*\()"
    r"([^\d()]*(?P<value>\\frac\{\d+\}\{\d+\}|\d+(?:[.,/]\d+)*)[^\d()]*\s)"
    r"\((?=[^()]*(?:=|\b(?:per|each|and)\b))[^()]*\)[\s.!]*",
    re.IGNORECASE,
)
REMARK = re.compile(
    r".*(?:\(\s*[a-z]{2,}[^()]*|\b(?:step|equation|part|line|figure|table|rounded to)\s*\(?)",
    re.IGNORECASE,
)
# Between a part and the whole: 6 of the 24, 6 left out of 10, 40 of her 100.
PART_OF = re.compile(
    r"\s*(?:of|(?:[a-z]+\s+){0,3}out of|(?:[a-z]+\s+)?of(?=\s+[a-z]))"
    r"(?:\s+(?:the|these|those|all|her|his|its|their|my|our|your))*\s*",
    re.IGNORECASE,
)
# Before the first end: it falls from 100 to 80, rounded 17.6 to 18. The last one is the result.
CHANGE = re.compile(
    r"\b(?:(?!(?:rang|var|run|last|anywhere|lie)\w*\b|(?:is|are|be)\b)\w+ from"
    r"|(?:round|convert|simplif|chang|reduc)\w*)\b[^,;]*$",
    re.IGNORECASE,
)
RANGE = re.compile(r"\s*(?:to|through|vs\.?|versus)\s*")  # between its ends
CHOICE_LIST = re.compile(r"\W*(?:\(?[A-J]\s*[).:][^A-Za-z]+){2,}")  # A: 1 B: 2
# 2024-01-31, 21-15, W L W, U.S.
SEQUENCE = re.compile(r"\d+(?:-\d+)+|\d+(?:/\d+){2,}|[A-Z](?: [A-Z])+|[A-Z](?:\.[A-Z])+")
VALUE = re.compile(rf"\d|\\[A-Za-z]|(?<![A-Za-z{{])(?:[A-Za-z]|{LETTER_PRODUCT})(?![A-Za-z])")


class _TooSlow(BaseException):
    """A comparison is over its limit; no `except Exception` of a library catches it."""


def math_equal(answer: str, truth: str) -> bool:
    """Return True if what an answer says last (or in its last box) equals the truth.

    What cannot be read, or compared in a few seconds, is not equal. May be called from any thread;
    it blocks the one it is called from, so an async method awaits it as
    `asyncio.to_thread(math_equal, answer, truth)`. Raises RewardError when the process that
    compares for a thread dies.
    """
    assert isinstance(answer, str), f"an answer is text, not a {type(answer).__name__}"
    if threading.current_thread() is not threading.main_thread():
        return _equal_in_pool(answer, str(truth))
    load_grammar()
    return _equal_in_time(answer, _truth(str(truth)))


def _equal_in_time(answer: str, truth: str) -> bool:
    """Compare for LIMIT_S at most."""
    is_running = True

    def stop(signum: int, frame: FrameType | None) -> None:
        if is_running:
            raise _TooSlow

    before, clock = signal.signal(signal.SIGALRM, stop), (0.0, 0.0)
    try:
        try:
            # Again and again, if a library swallows it.
            clock = signal.setitimer(signal.ITIMER_REAL, LIMIT_S, 0.2)
            return _equal(answer, truth)
        finally:
            is_running = False  # before anything else: it may ring at any call
    except _TooSlow:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, *clock)


def grade_answer(given_answer: str | None, ground_truth: object) -> bool:
    """Return True if an answer alone, such as that of `extract_boxed_answer`, equals the truth."""
    boxed = f"\\boxed{{{given_answer}}}"  # read as a whole
    return given_answer is not None and math_equal(boxed, str(ground_truth))


def _equal_in_pool(answer: str, truth: str) -> bool:
    """Compare in a worker that runs this very file; one that takes too long finds no equality."""
    pair = RewardBatch([answer], [""], [answer], [truth])
    try:
        return bool(_pool().submit(pair).result().rewards[0])
    except RewardError as error:
        if isinstance(error.__cause__, TimeoutError):
            return False
        raise


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> list[float]:
    """Compare answers with truths, in a worker."""
    return [float(math_equal(*pair)) for pair in zip(queries, labels, strict=True)]


@lru_cache(maxsize=1)
def _pool() -> FunctionPool:
    # Four processes of about 100 MB, which stay for the next comparison.
    return FunctionPool(
        __file__, batch_size=1, num_workers=4, timeout_s=POOL_TIMEOUT_S, memory_gib=4.0
    )


def _truth(text: str) -> str:
    """Return the answer that a label holds: in a box, after GSM8K's ####, or all of it."""
    if "\\boxed" in text or "####" in text:
        text = final_answers(text)[1][0]
    return plain_math(text).removesuffix(".")


def _equal(answer: str, truth: str) -> bool:
    is_boxed, texts = final_answers(answer)
    said = [plain_math(text[-MAX_ANSWER:]) for text in texts]
    if not truth or len(truth) > MAX_ANSWER or (is_boxed and len(texts[0]) > MAX_ANSWER):
        return bool(truth) and plain_math(texts[0]) == truth
    # C. A. Lincoln is a choice, but a name to who answers C. S. Lewis.
    is_name = NAME.match(truth) and (truth[0] > LAST_LABEL or NAME.search(said[0]))
    labelled = None if is_name else LABELLED.fullmatch(truth)
    if labelled or LETTERS.fullmatch(truth):
        chosen = next((letters for text in said if (letters := _chosen(text))), set())
        own = LABELLED.fullmatch(said[0]) if is_boxed and labelled else None
        if own and labelled and not _same_content(own[2], labelled[2]):
            return False
        if chosen or not labelled:
            return chosen == _chosen(truth)
        truth = labelled[2].strip()
    if _is_words(truth):
        if said[0] == "\\emptyset" and re.fullmatch("no (?:real )?solutions?", truth.lower()):
            return True
        return any(_same_words(text, truth) for text in _phrases(said[0], is_boxed))
    said[0] = _in_form(said[0], truth)
    if not is_boxed:
        said = [plain_math(DELIMITER.sub("$", text[-MAX_ANSWER:])) for text in texts]
        said = [_in_form(text, truth) for text in said]
        said[0] = next((value for text in said if (value := _value(text, truth))), "")
    return same_mathematics(said[0], truth) or _all_same(said[0], truth)


def _in_form(text: str, truth: str) -> str:
    """Return 2:5 for `2 to 5` if the truth is a ratio, and 1/6 for `1 in 6` if it is a fraction."""
    if re.fullmatch(r"\d[\d.]*(?:\s*:\s*\d[\d.]*)+", truth):
        return text if ":" in text else re.sub(r"(?<=\d) to (?=\d)", ":", text)
    if not re.fullmatch(r"-?[\d\s]*(?:/\d+|\\frac\{\d+\}\{\d+\}|\.\d+|\d%)", truth):
        return text
    return re.sub(r"(?:^|(?<=\bis ))(\d+) (?:in|out of) (\d+)(?=\W*$)", r"\1/\2", text)


def _same_content(given: str, truth: str) -> bool:
    """Return True unless two choices of one letter have nothing in common: C. Darwin, C. Columbus.
    The letter is the answer, not how it is repeated.
    """
    given = VERDICT.sub("", REASON.sub("", given))
    stems, wanted = ({w[:4] for w in re.findall(r"\w+", t.casefold())} for t in (given, truth))
    return not stems or bool(stems & wanted) or same_mathematics(given, truth)


def _chosen(text: str) -> set[str]:
    """Return the letters that a text chooses: C for (C) 12, both for A or B, none for not A."""
    text = _without_refuted(MENTIONED.sub("", re.sub(r"^(['\"])(.*)\1$", r"\2", text)))
    if re.fullmatch(r"[^\w\\!¬]*[A-Ja-j][^\w'^]*", text):
        return set(re.findall("[A-J]", text.upper()))
    if LETTERS.fullmatch(text):
        return set(re.findall("[A-J]", text))
    labelled = LABELLED.fullmatch(text)
    if labelled and not LETTER.search(INITIALS.sub("", labelled[2])):
        return {labelled[1]}
    text = REASON.sub("", DENIED.sub("", text))
    is_refused = WRONG.search(text) or ALL_BUT.search(text)
    return set() if is_refused else set(LETTER.findall(text))


def _without_refuted(text: str) -> str:
    """Leave out a clause that calls candidates wrong, if the rest names none of them."""
    text = NOT_RIGHT.sub(" is wrong", text)
    for found in REFUTED.finditer(text):
        rest = text.replace(found[0], "")
        names = re.findall(CANDIDATE, found["named"])
        if not set(names) & set(re.findall(CANDIDATE, rest)):
            text = rest
    return text


def _is_words(truth: str) -> bool:
    """Return True for words, names, dates and results of games; not for numbers with units, sin x
    or xy.
    """
    if SEQUENCE.fullmatch(truth):
        return True
    words = re.findall(r"[^\W\d_]+", truth)
    return bool(re.fullmatch(r"[^\W\d_][\w'’ .,&-]*", truth)) and any(
        (len(word) > 2 or ord(word[0]) > 0x3000 or word.lower() in ("no", "up"))
        and not re.fullmatch(f"{FUNCTIONS}|and|infty", word)
        for word in words
    )


def _same_words(given: str, truth: str) -> bool:
    """Compare the items of two texts; those that the truth joins by `and` have no order."""
    texts = [INITIAL.sub(r"\1", text.casefold()) for text in (given, truth)]
    texts = [re.sub(r" *([-/]) *", r"\1", TRIVIA.sub("", text)) for text in texts]
    texts = [re.sub(r"(\d)(?:st|nd|rd|th)\b", r"\1", text) for text in texts]
    items, wanted = ([" ".join(item.split()) for item in ITEM_END.split(text)] for text in texts)
    return items == wanted or (" and " in truth and sorted(items) == sorted(wanted))


def _phrases(text: str, is_boxed: bool) -> Iterator[str]:
    """Yield the candidate answers of a text: all of it and, outside a box, what follows its last
    verb.
    """
    yield text
    if is_boxed:
        return
    for part in (text, re.sub(r"\bbut\b", "", DENIED.sub("", text))):
        part = REASON.sub("", part)
        yield part.strip(" ,")
        end = max((found.end() for found in VERB.finditer(part)), default=0)
        if not DENIED.search(part[:end]):
            yield (phrase := part[end:].strip(" ,"))
            yield AGENT.sub("", phrase)
    said = {word.lower() for word in YES_OR_NO.findall(text)}
    if len(said) == 1 and SAYS_YES_OR_NO.match(text):
        yield said.pop()


def _all_same(text: str, truth: str) -> bool:
    """Return True for alternatives that all equal the truth: 1/2 or 0.5."""
    parts = re.split(r"\bor\b", re.sub(r"\((\s*or\b[^()]*)\)", r"\1", text))
    return len(parts) > 1 and all(same_mathematics(part, truth) for part in parts)


def _value(text: str, truth: str) -> str:
    """Return the last mathematics of a sentence, with its unit; all of them where it hedges."""
    if CHOICE_LIST.fullmatch(text):
        return ""
    text = _without_refuted(PREMISE.sub("", re.sub(r"^\d+[.)] (?=.)", "", text)))
    text = REASON.sub("", DENIED.sub("", text))
    text = text if "!" in truth else text.rstrip("!")
    formulas = [found.span() for found in MATH.finditer(text)]
    text = MATH.sub(r" \1 ", text)
    if WRONG.search(text):
        return ""
    is_hedged = bool(HEDGE.search(text))
    explained = EXPLAINED.fullmatch(text)
    if explained and not is_hedged and not VERB.search(explained[1], explained.end("value")):
        text = explained[1]
    has_parts = not is_hedged and QUANTITIES.fullmatch(truth.lower())  # 5 ft 3 in
    if has_parts and (quantities := [*QUANTITIES.finditer(text.lower())]):
        return quantities[-1][0]
    if not is_hedged and (parts := PARTS.search(text)):
        return parts[0]
    values: list[str] = []
    last_end, unit_end, is_said = 0, 0, False
    for after_prose, end in _between_prose(text, formulas):
        start = max(after_prose, unit_end)
        value = re.sub(
            r"^(?:[\s,;)]|and\b|or\b)+|(?:[\s,;(/=+*-]|\band|\bor)+$", "", text[start:end]
        )
        if value.count("{") != value.count("}"):
            value = value.strip("{}")
        before = text[:start].strip()
        if not VALUE.search(value) or BOUND.search(before) or BOUND_AFTER.match(text, end):
            continue
        value_end = text.index(value, start) + len(value)
        is_letter = len(value) == 1 and value.isalpha() and not truth.isalpha() and not is_hedged
        is_named = not before or VERB.fullmatch(before)
        if is_letter and not (is_named and not re.search(r"\w", text[value_end:])):
            continue  # Plan B, or by putting x back in
        between, last_end = text[last_end:start], value_end
        is_aside = (is_said and ASIDE.fullmatch(between)) or REMARK.fullmatch(between)
        if values and is_aside and "and" not in value and not is_hedged:
            continue
        if values and PART_OF.fullmatch(between):
            _, equals, value = value.rpartition("=")
            if not equals:
                continue
        unit = UNIT_AFTER.match(text, end)
        is_linked = RANGE.fullmatch(text, unit_end, start) and not CHANGE.search(text[:unit_end])
        if values and is_linked and _is_range(values[-1], f"{value} {unit[0] if unit else ''}"):
            value = f"{values.pop()} to {value}"
        unit_end = unit.end() if unit else end
        is_said = bool(is_named or unit or value.startswith("$"))
        values.append(f"{value} {unit[0]}" if unit else value)
    if is_hedged:
        return " or ".join(values)
    return values[-1] if values else ""


def _is_range(first: str, last: str) -> bool:
    """Return False for two forms of a value: 6/8 to 3/4, or 2 feet to 24 inches."""
    units = [unit.rstrip("s") for side in (first, last) for unit in re.findall("[a-z]+$", side)]
    return not same_mathematics(first, last) and (len(units) < 2 or units[0] == units[1])


def _between_prose(text: str, formulas: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return start and end of each stretch without prose."""
    prose = [
        found.span()
        for found in PROSE.finditer(text)
        if not IN_MATH.fullmatch(text, *found.span())
        or not any(start < found.start() < end for start, end in formulas)
    ]
    starts, ends = [0, *(end for _, end in prose)], [*(start for start, _ in prose), len(text)]
    return list(zip(starts, ends, strict=True))
