"""Reading mathematical answers: pure functions on text that reward files import."""

import re
import unicodedata
from typing import Any

BOX = re.compile(r"\\+(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
BOX_COMMAND = re.compile(r"\\+(?:boxed|fbox)\s*(?=\{)")
BETWEEN_BOXES = re.compile(
    r"[\s$,;/|(]*(?:\\q?quad|\\text\{\s*(?:and|or)\s*\}|and|or|vs\.?|versus)?"
    r"(?:[\s$,;/|(]|perhaps|maybe|alternatively)*(?:[A-Za-z](?:_\w|_\{\w+\})?\s*=\s*)?"
)
BETWEEN_ANSWERS = re.compile(rf"</answer>{BETWEEN_BOXES.pattern}<answer>")
MAX_TAIL = 2000  # characters at the end of a text in which its conclusion is looked for
END_TOKEN = re.compile(r"(?:<[|｜][\w▁-]+[|｜]>|</s>|<eos>|<end_of_turn>)\s*$")
EMPHASIS = re.compile(r"(?<![\w)])\*\*|\*\*(?![\w(-])|`|(?<!\w)__?|__?(?![\w{])")
BARE_BOX = re.compile(r"\\boxed\s*(\d+|[A-Z])(?!\w)")
DISPLAY = re.compile(r"\\\[.*?\\\]|\$\$.*?\$\$|\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)
TO_END = r"\b(?:(?!not\b|n['’]t)[^.\n:=]|\.\d){0,60}?"
ANNOUNCED = re.compile(
    r"####(?!#|\s*(?-i:\d+[.)] [A-Z]))|<answer>"
    r"|答案(?:应该|应)?(?:是|为)?|故?选择?(?=[\s:：(（]*[A-J])|答(?=[:：])"
    r"|(?:\bto (?:\w+ (?:at )?(?:the|our|an?|this) (?:\w+ )?)?)?"
    rf"(?<!/)\b(?:answers?{TO_END}(?:\b(?:is|are|be)\b|[:：=]|\n)"
    rf"|solutions?{TO_END}(?:\b(?:is|are|be)\b|=))",
    re.IGNORECASE,
)
# No answer alone, but words before a number, or a calculation.
WORKING = re.compile(
    r"(?!\W*(?:(?i:option|choice)\b|[A-J](?!\w| [a-z])))"
    r".*?(?:(?<!\\)\b[A-Za-z]{3,}.*\d|\d\s*[-+*/×÷].*=)",
    re.DOTALL,
)
DOUBT = (
    r"(?:(?<!\bno )(?<!\ba )(?<!\bany )(?<!\bwithout )\bdoubt(?:s|ed|ful)?\b"
    r"|\bno way(?= (?:that|the|it|this)\b)"
    r"|(?<!\bnot )\b(?:un|im)(?:likely|clear|certain|sure|possible|probable)"
    r" (?:that|for|to be(?! \w+(?:ed|en|wn)\b)|if|whether)\b)"
)
DOUBTED = re.compile(  # before an announcement
    rf"(?:{DOUBT}|(?:\bnot|\bnever|n['’]t) (?:think|believe|say|claim|sure|certain|true)\b)"
    r"(?:(?!\b(?:but|so|thus|hence|therefore)\b)[^,;.:!?\n])*$",
    re.IGNORECASE,
)
LIST_MARK = re.compile(r"\d+[.)]")
EXPLANATION = re.compile(r"\W*(?:explanation|reason|because|check|verif|proof|note)", re.IGNORECASE)
# Behind an answer: that it may be taken back, and what is said in its place.
TAKEN_BACK = re.compile(
    r"[.!?,;:\n]\s*(?:but |oh,? |no,? |hmm,? )*"
    r"(?:wait\b|no(?=[,.])|actually\b|correction\b|oops\b|on second thought"
    r"|that(?:['’]s| is| was) (?:wrong|incorrect|not (?:right|correct))"
    r"|I (?:made a mistake|was wrong))",
    re.IGNORECASE,
)
CLAIM = re.compile(
    r"(?:(?<=no),?|(?<=wait)[,:]|(?<=actually),?|(?<=correction):|\b(?:it|that|this)(?:['’]s| is)"
    r"|\b(?:should|must) be|\bmake that)\s+(?=[-+$\\(]*\d|\\|\(?(?-i:[A-J])\b(?!['’]))",
    re.IGNORECASE,
)
SENTENCE = re.compile(  # which does not end within J. K. Rowling or (B) A. Lincoln
    r"(?<=[.!?])\s+(?=(?:The|This|That|It|They|He|She|We|So|In|But|However)\b)"
    r"|(?<=[.!?])(?<!\b[A-Z][.:)] [A-Z]\.)(?<!\b[A-Z]\.[A-Z]\.)\s+(?!(?<=\b[A-Z]\.\s)[A-Z]\.)"
    r"(?=[A-Z\\$(\[*]|$)|。|\n|</"
)

# Signs that mathematics writes in many ways.
VULGAR, SUPER, SUB = (
    re.compile("[¼-¾⅐-⅞]|[⁰¹²³⁴-⁹]+⁄[₀-₉]+"),
    re.compile("[⁰¹²³⁴-⁹⁺⁻]+"),
    re.compile("[₀-₉]+"),
)
SIGNS = {
    "−": "-",
    "–": "-",
    "‐": "-",
    "¢": " cents",
    "⁄": "/",
    "∕": "/",
    "。": ".",
    "、": ",",
    "∶": ":",
    "≈": r"\approx ",
}
SIGNS |= {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "π": r"\pi "}
SIGNS |= {"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∪": r"\cup "}
SIGNS |= {"∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ", "’": "'"}
# What NFKC makes other signs of.
LOST = {ord(c): rf"\mathbb{{{unicodedata.normalize('NFKC', c)}}}" for c in "ℂℕℚℝℤ"}
LOST |= {ord("º"): "°", ord("˚"): "°"}
FUNCTIONS = "sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|pi"
TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|[br]m|boldsymbol|pmb|underline)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
# Words before and after a number that make another number of it.
POWERS = {"tenth": -1, "hundredth": -2, "thousandth": -3, "millionth": -6}
POWERS |= {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9}
POWERS |= {"trillion": 12, "百万": 6, "千万": 7, "万": 4, "亿": 8}
PARTS = {"halves": 2, "thirds": 3, "fourths": 4, "fifths": 5, "sixths": 6, "sevenths": 7}
PARTS |= {"eighths": 8, "ninths": 9}
OPERATORS = {"minus|negative": "-", "plus": "+", r"times|multiplied by": r"\\times "}
OPERATORS |= {"divided by": "/", "(?:raised )?to the power of": "^"}


def _power(number: str, words: str) -> str:
    """Return 5\\times 10^{5} for 5 hundred thousand, 10^{-5} for hundred thousandths."""
    exponents = [POWERS[word] for word in re.findall("|".join(POWERS), words.lower())]
    sign = -1 if exponents[-1] < 0 else 1
    return rf"{number}\times 10^{{{sign * sum(map(abs, exponents))}}}"


NUMBER_WORDS: list[tuple[str, Any]] = [
    *((rf"(?<!\\)\b(?:{words})\s+(?=[\d.$\\(])", sign) for words, sign in OPERATORS.items()),
    (
        rf"(\d\$?)((?:[\s-]*(?:{'|'.join(POWERS)})s?(?![A-Za-z]))+)",
        lambda words: _power(*words.groups()),
    ),
    *((rf"(\d)[\s-]{word}\b", rf"\1/{n}") for word, n in PARTS.items()),
    (r"(\d\$?)[\s-]*dozens?\b", r"\1\\times 12"),
    (r"(?<=[\d)}$])\s+squared\b", "^2"),
    (r"(?<=[\d)}$])\s+cubed\b", "^3"),
    (r"(?<=\d)\s+factorial\b", "!"),
    (
        r"\ball (?:real )?numbers (greater|less) than( or equal to)? (?=-?[\d.]+\W*$)",
        lambda found: "x " + (">" if found[1].lower() == "greater" else "<") + "=" * bool(found[2]),
    ),
    (r"(\d+) choose (\d+)", r"\\binom{\1}{\2}"),
    (r"\b(?:the )?square root of ([\d.]*\d)", r"\\sqrt{\1}"),
    (r"\b(?:the )?cube root of ([\d.]*\d)", r"\\sqrt[3]{\1}"),
]
PLAIN = [
    (re.compile(pattern), plain)
    for pattern, plain in [
        (r"<<[^<>\n]*>>", ""),  # GSM8K's calculations
        (r"\\(?:begin|end)\{(?:align|aligned|gather|gathered|split|equation)\*?\}", ""),
        (r"(?:\\\\)?\s*&\s*=", "="),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:Large|large|LARGE|huge|rm|bf)(?![A-Za-z{])", ""),
        (r"(?:√|\\?(?<![A-Za-z])sqrt)\s*(\d[\d.]*\d|\d)", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (r"\\sqrt\s*\[(\d+)\]\s*(\d+)", r"\\sqrt[\1]{\2}"),
        (r"∛\s*(\d+)", r"\\sqrt[3]{\1}"),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\{,\}(?=\d{3}(?!\d))", ","),
        (r"\{,\}", "."),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|!)(?![A-Za-z])\.?", ""),
        (r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}", r"\\binom{\1}{\2}"),
        (r"(?<!\\)\\(?:(?:q?quad|enspace|thinspace)(?![A-Za-z])|[,;: ])|~", " "),
        (r"(?<!\\)\\[()\[\]]", " "),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\\([%$#&])", r"\1"),
        (r"\\([lg])eq(?:slant)?(?![A-Za-z])", r"\\\1e "),
        (r"\\neq(?![A-Za-z])|!=|\\not\s*=", r"\\ne "),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\{:\}", ":"),
        (r"\*\*", "^"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])[Ii]nfinity(?![A-Za-z])", r"\\infty "),
        (r"\\varnothing|\\\{\s*\\\}", r"\\emptyset "),
        (r"\b([ap])\.\s?m\.?(?![A-Za-z])", r"\1m"),
        (r"\\+\s*$", ""),
        (r"\s+", " "),
        *((f"(?i:{pattern})", plain) for pattern, plain in NUMBER_WORDS),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
    ]
]


def extract_boxed_answer(text: str) -> str | None:
    """Return the content of the last \\boxed{...} of a text, with balanced braces; None without
    one, or if it is cut off.

    A box in a box is part of the outer one.
    """
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def final_answers(text: str) -> tuple[bool, list[str]]:
    """Return True with the last box of a text, or False with the sentences that may hold its
    answer: first the one that announces it, then the last ones, last first.

    Boxes with nothing but `and`, `or` or a comma between them are one list.
    """
    text = END_TOKEN.sub("", text)
    thought, _, said = text.rpartition("</think>")
    text = said if said.strip() else thought or text
    text = BARE_BOX.sub(r"\\boxed{\1}", text)
    boxes = _boxes(text)
    if boxes or BOX_COMMAND.search(text):
        return True, [_last_boxes(text, boxes)]
    text = EMPHASIS.sub("", BETWEEN_ANSWERS.sub(" or ", text[-MAX_TAIL:]))
    text = DISPLAY.sub(lambda found: found[0].replace("\n", " "), text)
    sentences = [part.strip() for part in SENTENCE.split(text) if part and part.strip()][::-1]
    announced = [found for found in ANNOUNCED.finditer(text) if _announces(found)]
    if announced and (back := TAKEN_BACK.search(text, announced[-1].end())):
        announced = list(CLAIM.finditer(text, back.end())) or announced
    sentences = [sentence for sentence in sentences if not sentence.endswith(("?", "？"))]
    if announced:
        sentences.insert(0, _sentence_and_rest(announced[-1])[0])
    return False, sentences or [""]


def _sentence_and_rest(announced: re.Match[str]) -> tuple[str, str]:
    said = announced.string[announced.end() :].lstrip(" \n\t:：=")
    sentence, *rest = SENTENCE.split(said, maxsplit=1)
    return sentence.strip(), "".join(rest)


def _announces(found: re.Match[str]) -> bool:
    """Return False for `Answer:` above the working and for `to find the answer`, if values follow
    in later sentences; and for `I doubt that the answer is`.
    """
    if DOUBTED.search(found.string[: found.start()]):
        return False
    is_sought = found[0].lower().startswith("to ")
    is_heading = found[0][-1] in "#:：\n" and not is_sought
    sentence, rest = _sentence_and_rest(found)
    if not (is_heading or is_sought) or not re.search(r"\d|\\[A-Za-z]", rest):
        return True
    is_list = LIST_MARK.fullmatch(sentence) and re.search(rf"\n\W*{LIST_MARK.pattern}\s", rest)
    is_working = is_list or (WORKING.match(sentence) and not EXPLANATION.match(rest))
    return is_heading and not is_working


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Return start, end and content of the outermost boxes; none if the last one is not closed."""
    boxes: list[tuple[int, int, str]] = []
    opened: list[re.Match[str]] = []
    for found in BOX.finditer(text):
        if found[0] == "}":
            start = opened.pop() if opened else found
            if start[0].startswith("\\"):
                content = BOX_COMMAND.sub("", text[start.end() : found.start()]).strip()
                while boxes and boxes[-1][0] > start.start():
                    inner = boxes.pop()[2]
                    content = inner if content == f"{{{inner}}}" else content
                boxes.append((start.start(), found.end(), content))
        elif found[0].endswith("{") and found[0] != "\\{":
            opened.append(found)
    is_cut = any(o[0] != "{" and (not boxes or o.start() > boxes[-1][1]) for o in opened)
    return [] if is_cut else boxes


def _last_boxes(text: str, boxes: list[tuple[int, int, str]]) -> str:
    """Return the content of the last box, joined with those that it continues."""
    contents: list[str] = []
    next_start = len(text)
    for start, end, content in reversed(boxes):
        if contents and not BETWEEN_BOXES.fullmatch(text, end, next_start):
            break
        if content not in contents:
            contents.insert(0, content)
        next_start = start
    return ", ".join(contents)


def _vulgar(found: re.Match[str]) -> str:
    top, bottom = unicodedata.normalize("NFKC", found[0]).split("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}"


def plain_math(text: str) -> str:
    """Return a text with one form for each sign: no layout commands, no Unicode of mathematics."""
    text = text.translate(LOST)
    text = VULGAR.sub(_vulgar, text)
    text = SUPER.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = SUB.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = "".join(c for c in text if unicodedata.category(c) not in ("Cf", "So") or c == "°")
    text = unicodedata.normalize("NFKC", text)
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    text = TEXT.sub(r" \1 ", TEXT.sub(r" \1 ", text))
    for pattern, plain in PLAIN:
        text = pattern.sub(plain, text)
    return text.strip()
