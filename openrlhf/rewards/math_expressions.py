"""Compares two pieces of mathematics: numbers with units here, expressions as math-verify parses
them.

Integers and fractions are equal if they are the same. A decimal of six significant digits or more
equals what it is a rounding of. Expressions are equal if they have the same values at sampled
points, to a relative tolerance; math-verify's own comparison is absolute, so that 6.02e-23 would
equal 1.38e-23.
"""

import logging
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import math_verify
import mpmath
import sympy
from math_verify import LatexExtractionConfig
from sympy.core.relational import Relational

from openrlhf.utils.math_utils import FUNCTIONS

LOAD_TIMEOUT_S = 60  # of math-verify's grammar, on a busy machine
MAX_EXPONENT = 5000
LAST_DIGIT = Fraction(1, 100_000)  # of a rounded number, relative to it: six digits
TOLERANCE, EXACT_TOLERANCE = 1e-5, 1e-12  # relative, of expressions with decimals and without
NUM_POINTS = 8
# What sympy and mpmath raise for what they cannot evaluate.
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
    mpmath.libmp.NoConvergence,
    sympy.PolynomialError,
)
BLANK = re.compile(r"(?<!\d)\s+|\s+(?!\d)")
NUMERAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
GROUPED = re.compile(r"(?<![\w.,])\d{1,3}(?:([ ,])\d{3})(?:\1\d{3})*(?![\d,]|\s\d)")
FRACTION = re.compile(rf"\\frac\s*\{{\s*([+-]?{NUMERAL})\s*\}}\s*\{{\s*({NUMERAL})\s*\}}")
DECIMAL = re.compile(
    rf"([+-]?)\s*({NUMERAL})(?:[eE]([+-]?\d+)"
    r"|\s*(?:\\times|\\cdot|[*x])\s*10\s*\^\s*(?:\{\s*([+-]?\d+)\s*\}|([+-]?\d+)))?"
)
MIXED = re.compile(rf"([+-]?)\s*(?:(\d+)\s+)?([+-]?{NUMERAL})\s*/\s*({NUMERAL})")
UNWORKED = re.compile(
    r"(?![-+(\s]*[\d.,]+[)\s]*$)[\d\s.,+\-*/()]+$|.*(?:[\w)}\]!]\s*(?:[+\-*]|\\(?:times|cdot|div|ast|pm|mp)(?![A-Za-z]))"
    r"|\\(?:sum|int|prod|lim|gcd|lcm|max|min|det)(?![A-Za-z]))"
)
# Behind what no decimal writes: \sqrt{2} \times 10^{-3}.
SCALE = re.compile(r"(?:\\times|\\cdot|[*x])\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|[+-]?\d+)\s*$")
CLOCK = re.compile(r"(\d{1,2})(?::([0-5]\d))?\s*(?:([ap])m)?", re.IGNORECASE)
CHAIN = re.compile(r"(?:(?<![<>!:])=|\\(?:approx|equiv)(?![A-Za-z]))(?![^{}]*\})")
HUGE = re.compile(r"\^\s*\{?\s*[+-]?\d{6}|(?:\^\{[^{}]*){3}|\d{6}\s*!|!\s*!|phantom")
# What is no product of letters: 10 to 15, 5 R 2.
WORDS = re.compile(
    r"(?<![\\A-Za-z])(?:to|by|of|from|with)(?![A-Za-z])"
    rf"|(?<![\w^{{.])[\d.]+\s*(?!(?:x|and|or|{FUNCTIONS})\b)[A-Za-z]+\s+\d"
)
QUANTITIES = re.compile(rf"(?:{NUMERAL}\s*[a-z]+\.?\s*){{2,}}")
INEQUALITY = re.compile(r"[<>]|\\[lg]e(?![A-Za-z])")
VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
IMPLIES = re.compile(r"\\(?:implies|iff|to|Rightarrow|rightarrow)(?![A-Za-z])|[=-]>|[→⇒]")
BASE = re.compile(r"(?<=\d)_\s*(?:\{\s*(\d+)\s*\}|(\d+))$")
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*(?:\{(\d+)\}|(\d))")
RATIO = re.compile(rf"{NUMERAL}(?:\s*:\s*{NUMERAL}){{2,}}")
BUILDER = re.compile(
    r"^\\\{\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![A-Za-z])|\||:)"
    r"\s*([^{}]*(?:[<>]|\\(?:[lg]e|ne)(?![A-Za-z])).*)\\\}$"
)
MEMBER = re.compile(r"^(?:[A-Za-z]\s*\\in|\([A-Za-z,\s]+\)\s*=)\s*(?=[\[({\\])")
# x_1 = 1, x_2 = 2 has the names x_1 and x_2.
NAMES = re.compile(r"(?<![\\A-Za-z])([A-Za-z](?:_(?:\{\w+\}|\w))?)\s*=")
INDEX = re.compile(r"(?<=[A-Za-z])_(?:\{\w+\}|\w)(?=\s*=)")
FOR_INTEGERS = re.compile(
    r"(?<=\S)[\s,;]*\(?\s*\b([kmn])\s*\\in\s*(?:\\mathbb\s*\{?)?\s*Z\s*\}?\s*\)?\s*$"
)
MONEY = re.compile(r"([-+]?)\s*(?:(?:US)?\$|([€£¥₹₩₽₺₫₪₱]|Rs\b)\.?|USD\b)\s*(?=[\d.])")
MONEY_BEHIND = re.compile(r"(?<=\d)\s*([€£¥₹₩₽₺₫₪₱])$")
CURRENCIES = {"": "dollar", "€": "euro", "£": "lb", "¥": "yuan", "₹": "rupee", "Rs": "rupee"}
UNIT = re.compile(
    r"(?:(?<=[\s\d)}°/·]))(?:(?<![^\W\d_])(?<!\\)(?:[^\W\d_]+|°\s*[CF]?)(?:\s*\^\s*\{?-?\d\}?)?[\s/·.]*)+$"
)
SINGLE_LETTER_UNITS = set("mgshLlJNVWKCFA")
OPERATOR = re.compile(r"(?:[-+*/=^_(<>,|]|\\(?!pi|circ|infty)[A-Za-z]+)\s*$")
# Of the names of variables alone, and no bag, cab or day: 12 abc.
PRODUCT = re.compile(r"(?<![^\W\d_])(?![bcdgh]a[bdgy](?![a-z]))[a-dghxyz]{2,}(?![^\W\d_])")
# Right behind a value or where it has variables, also of others: 5pq, 2\pi rh.
GLUED_PRODUCT = re.compile(
    r"(?<![^\W\d_])(?!(?:of|an|sq|cu|fl|st|nd|rd|th|am|pm)(?![a-z]))(?:[a-z]{2}|[b-df-hj-np-tv-z]{2,}|[a-dghxyz]{2,})(?![^\W\d_])"
)
NO_UNIT = re.compile(
    rf"\b(?:{FUNCTIONS}|or|and|not|is|are|more|less|at|if|when|to|than|maybe|x|infty|le|ge)\b|\bin\b(?!\s*(?:\^|$))"
)
UNIT_NAMES = {
    "m": "meter metre",
    "cm": "centimeter centimetre",
    "mm": "millimeter millimetre",
    "km": "kilometer kilometre",
    "g": "gram",
    "kg": "kilogram",
    "s": "second sec",
    "min": "minute",
    "h": "hour hr",
    "l": "liter litre",
    "ml": "milliliter millilitre",
    "ft": "foot feet",
    "inch": "inche",
    "mi": "mile",
    "lb": "pound",
    "deg": "° degree",
    "unit": "",
    "dollar": "usd buck",
    "euro": "eur",
    "yuan": "元 rmb",
    "rupee": "rs inr",
    "yr": "year",
    "wk": "week",
    "ha": "hectare",
    "km/h": "kph kmph",
    "mi/h": "mph",
}
OTHER_UNITS = "mg hz khz mhz ghz pa kpa kw kwh kj ms kb mb gb tb oz yd rpm ppm pcs pts tsp day cc"
OTHER_UNITS += " hp nm qt fps bps cent"
CANONICAL = {name: unit for unit, names in UNIT_NAMES.items() for name in [unit, *names.split()]}
CANONICAL |= {unit: unit for unit in OTHER_UNITS.split()}
UNIT_WORDS = "|".join(sorted(CANONICAL, key=len, reverse=True))
# A single letter with a blank, from \mathrm: 5(m) is a product.
BRACKETED_UNIT = re.compile(
    rf"(?<=[\d}})\s])\((?=\s|[A-Za-z°]{{2}})\s*"
    rf"((?:(?:{UNIT_WORDS})s?(?![A-Za-z])(?:\s*\^\s*\{{?-?\d\}}?)?[\s/·]*)+)\)\s*$"
)
CANONICAL["in"] = "inch"  # no unit in a sentence


class Number(NamedTuple):
    """A number as it is written: 12.50% is Number(Fraction(25, 2), Fraction(1, 100), True).

    Example: `Number(Fraction(1, 2), Fraction(1, 10))` is 0.5, `Number(Fraction(1, 2))` is 1/2.
    """

    value: Fraction
    last_digit: Fraction | None = None  # None for integers and fractions
    is_percent: bool = False


def same_mathematics(given: str, wanted: str) -> bool:
    """Return True if two texts (of `plain_math`) are equal as numbers, expressions, sets and so on.

    Units are compared if both have one. A sum or product of numbers does not equal a number: it is
    not worked out.
    """
    given, wanted = _ungrouped(given), _ungrouped(wanted)
    if BLANK.sub("", given) == BLANK.sub("", wanted):
        return bool(given)
    times = CLOCK.fullmatch(given), CLOCK.fullmatch(wanted)
    if times[0] and times[1] and all(time[2] or time[3] for time in times):
        return _same_time(times[0], times[1])
    given, wanted = _of_integers(given), _of_integers(wanted)
    given, wanted = _like(given, wanted), _like(wanted, given)
    # Who asks for x^2 + y^2 = 5 does not ask for 5.
    if CHAIN.search(wanted) and re.search(r"[+*/^-]", CHAIN.split(wanted)[0]):
        return _same(given, wanted)
    targets = _claims(wanted, given)
    return any(_same(value, target) for value in _claims(given, wanted) for target in targets)


def _same(given: str, wanted: str) -> bool:
    if (quantities := _quantities(given)) and (others := _quantities(wanted)):
        return quantities == others
    given, unit = _parted(given)
    wanted, wanted_unit = _parted(wanted)
    if unit and wanted_unit and unit != wanted_unit:
        return False
    if RATIO.fullmatch(given) or RATIO.fullmatch(wanted):
        return _shares(given) == _shares(wanted)
    number, target = _number(given), _number(wanted)
    if number and target:
        return _same_number(number, target)
    if target and UNWORKED.match(SCALE.sub("", given)):
        return False
    are_bounds = INEQUALITY.search(given) and INEQUALITY.search(wanted)
    if are_bounds and set(VARIABLE.findall(given)) != set(VARIABLE.findall(wanted)):
        return False
    try:
        found, expected = _read(given), _read(wanted)
        if found is None or expected is None:
            return False
        if number or target:
            number, target = number or _constant(found), target or _constant(expected)
        if number and target and (number.last_digit or target.last_digit):
            return _same_number(number, target)
        return _agree(found, expected)
    except UNREADABLE:
        return False


def _quantities(text: str) -> list[tuple[str, Fraction]]:
    """Return unit and number of each part of 5 ft 3 in or 3 boys and 5 girls, in the order of the
    units; none of another text.
    """
    text = re.sub(r"\band\b|,", " ", text.lower())
    if not QUANTITIES.fullmatch(text.strip()):
        return []
    units = (_canonical(found) for found in re.finditer("[a-z]+", text))
    return sorted(zip(units, map(Fraction, re.findall(NUMERAL, text)), strict=True))


def _shares(text: str) -> list[Fraction]:
    """Return the parts of a ratio, 3:2:1 or 6:4:2, which add up to 1; none of another text."""
    parts = [Fraction(part) for part in text.split(":")] if RATIO.fullmatch(text) else []
    return [part / (sum(parts) or 1) for part in parts]


def _ungrouped(text: str) -> str:
    """Return 12345 for 12,345 and for 12 345, but not within brackets: (1,234) is a pair."""
    text = text.replace("$$", "$")
    if text.count("$") != 1:
        text = text.replace("$", " ")
    text = text.strip(" ;:,*\"'").rstrip(" .;:,*")
    if re.fullmatch(r"\{[^{}]*\}", text):
        text = f"\\{text[:-1]}\\}}" if "," in text else text[1:-1]
    if "," not in text:
        text = text.replace(";", ",")  # (-\infty; 3]
    if re.search(r"(?:[(\[]|\\\{)\s*[^()\[\]{}]*,", text):
        return re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<![\w.,])\d{1,3}(?:\.\d{3}){2,}(?![\d.])", _undotted, text)
    return GROUPED.sub(lambda found: re.sub("[ ,]", "", found[0]), text).strip()


def _undotted(found: re.Match[str]) -> str:
    return found[0].replace(".", "")


def _of_integers(text: str) -> str:
    """Return 2k\\pi for 2n\\pi, n \\in \\mathbb{Z}; a bound on integers stays."""
    found = FOR_INTEGERS.search(text)
    if not found or INEQUALITY.search(text):
        return text
    return re.sub(rf"(?<![\\A-Za-z]){found[1]}(?![A-Za-z])", "k", text[: found.start()])


def _like(text: str, other: str) -> str:
    """Return a list without brackets in those of the other side, and the condition of a set;
    `x \\in` is left out, and the indices of names if the other side has none: x = 1, x = 2.
    """
    names = NAMES.findall(other)
    if len(names) > 1 and len(set(names)) == 1 and "_" not in names[0]:
        text = INDEX.sub("", text)
    text, other = (MEMBER.sub("", BUILDER.sub(r"\1", side)) for side in (text, other))
    is_tuple, is_set = re.fullmatch(r"\(.*,.*\)", other), re.fullmatch(r"\\\{.*,.*\\\}", other)
    if (is_tuple or is_set) and "," in text and not re.search(r"[()\[\]]|\\\{", text):
        return f"({text})" if is_tuple else f"\\{{{text}\\}}"
    return text


def _claims(text: str, other: str) -> Sequence[str]:
    """Return the values of a chain: its last member, and one before `\\approx`; none if it is
    false.
    """
    if IMPLIES.search(text):
        return []
    parts = [re.sub(r"^\{([^{}]*)\}$", r"\1", part.strip()) for part in CHAIN.split(text)]
    if len(parts) == 1 or re.search(r",|;|\bor\b|\band\b", text):
        return [text]
    if len(parts) == 2 and len(CHAIN.split(other)) == 2:
        name, other_name = (re.sub(r"\s", "", CHAIN.split(t)[0]) for t in (text, other))
        return [parts[1]] if name == other_name and "\\approx" not in text + other else [text]
    claims = parts[-2:] if "\\approx" in text else parts[-1:]
    values = [value for part in parts if (value := _evaluated(part)) is not None]
    scale = max(map(abs, values), default=0)
    is_true = all(abs(value - values[-1]) <= scale / 100 for value in values)
    return claims if is_true else []


def _evaluated(text: str) -> Any | None:
    """Return the value of a text that is a number or an expression of numbers."""
    text = _parted(text)[0]
    try:
        if number := _number(text):
            value = mpmath.mpf(number.value.numerator) / number.value.denominator
            return value / 100 if number.is_percent else value
        expression = _read(text)
        return mpmath.mpmathify(expression.evalf()) if expression is not None else None
    except UNREADABLE:
        return None


def _same_time(a: re.Match[str], b: re.Match[str]) -> bool:
    if not (a[3] or b[3]):
        return (int(a[1]), a[2]) == (int(b[1]), b[2])
    return bool(_minutes(a) & _minutes(b))


def _minutes(time: re.Match[str]) -> set[int]:
    """Return the minutes since midnight that a time may be: 2:30 is in the morning or not."""
    hours, minutes = int(time[1]), int(time[2] or 0)
    if time[3]:
        return {(hours % 12 + 12 * (time[3] in "pP")) * 60 + minutes}
    return {hours * 60 + minutes} | ({(hours % 12 + 12) * 60 + minutes} if hours <= 12 else set())


def _parted(text: str) -> tuple[str, str]:
    """Return a value and its unit: dollar of $5, m^2 of 5 square metres, or none."""
    text = BRACKETED_UNIT.sub(r" \1", text)
    if money := MONEY.match(text):
        amount, currency = text[money.end() :], CURRENCIES.get(money[2] or "", money[2])
        value, unit = _parted(amount)
        return money[1] + (value if unit == currency else amount), currency  # $5 dollars
    if money := MONEY_BEHIND.search(text):
        return text[: money.start()], CURRENCIES.get(money[1], money[1])
    if base := BASE.search(text):
        return text[: base.start()], f"base {base[1] or base[2]}"
    found = UNIT.search(text)
    value = text[: found.start()] if found else ""
    if not found or not re.search(r"\d|pi", value) or OPERATOR.search(value):
        return text, ""
    unit = re.sub(r"^of (?:an?|the) (?=[a-z]{2})", "", found[0].strip(" ."))
    # 5 m is a length, 5m, 5 x and x + 5 m are products.
    letters = set(VARIABLE.findall(unit))
    is_glued = value[-1] != " "
    is_sum = VARIABLE.search(value) and not _number(value)
    is_product = letters - SINGLE_LETTER_UNITS or (unit[0] in letters and is_glued)
    is_short = is_glued or is_sum or value.endswith("\\pi ")
    products = (GLUED_PRODUCT if is_short else PRODUCT).finditer(unit)
    if (
        NO_UNIT.search(unit)
        or is_product
        or (letters and is_sum)
        or any(map(_is_unknown, products))
    ):
        return text, ""
    unit = re.sub(r"\bus\s+(?=dollar)", "", unit.lower())
    unit = re.sub(r"\b(?:square|sq)\.?\s+(\w+)", r"\1^2", unit)
    unit = re.sub(r"\b(?:cubic|cu)\.?\s+(\w+)", r"\1^3", unit)
    unit = re.sub(r"\s+per\s+", "/", unit)
    names = re.sub(r"[{}\s]", "", re.sub(r"[^\W\d_]+|°", _canonical, unit))
    return value.strip(), names


def _canonical(found: re.Match[str]) -> str:
    name = found[0]
    singular = name.removesuffix("s") if len(name) > 2 else name
    return CANONICAL.get(name) or CANONICAL.get(singular) or singular


def _is_unknown(found: re.Match[str]) -> bool:
    name = found[0].lower()
    return name not in CANONICAL and name.removesuffix("s") not in CANONICAL


def _number(text: str) -> Number | None:
    """Return the decimal, 6.02e23, fraction or mixed number that a text is, also with %."""
    is_percent = bool(re.search(r"(?:%|\bpercent)\s*$", text))
    text = re.sub(r"(?:%|\bpercent)\s*$", "", text).strip()
    if text.startswith("(") and text.endswith(")") and "(" not in text[1:]:
        text = text[1:-1].strip()
    text = REPEATING.sub(_repeating, FRACTION.sub(r" \1/\2 ", text)).strip()
    if found := MIXED.fullmatch(text):
        sign, whole, top, bottom = found.groups()
        if not Fraction(bottom) or (whole and not top[0].isdigit()):
            return None
        value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom)
        return Number(-value if sign == "-" else value, None, is_percent)
    found = DECIMAL.fullmatch(text)
    if not found:
        return None
    exponent = int(found[3] or found[4] or found[5] or 0)
    if abs(exponent) > MAX_EXPONENT:
        return None
    power = Fraction(10) ** exponent
    value = Fraction(found[2]) * power * (-1 if found[1] == "-" else 1)
    digits = len(found[2].partition(".")[2])
    is_decimal = digits > 0 or exponent < 0
    return Number(value, power / 10**digits if is_decimal else None, is_percent)


def _repeating(found: re.Match[str]) -> str:
    whole, digits, period = found[1], found[2], found[3] or found[4]
    nines = 10 ** len(digits) * (10 ** len(period) - 1)
    return f"{int(whole + digits + period) - int(whole + digits or 0)}/{nines}"


def _same_number(a: Number, b: Number) -> bool:
    if a.is_percent == b.is_percent:
        return _same_value(a, b)
    whole, percent = (b, a) if a.is_percent else (a, b)  # 50% is 0.5 and 50
    digit = percent.last_digit and percent.last_digit / 100
    is_same = abs(whole.value) >= 1 and _same_value(whole, percent)
    return is_same or _same_value(whole, Number(percent.value / 100, digit))


def _same_value(a: Number, b: Number) -> bool:
    """Return True for the same value; a decimal may be a rounding, an integer may not."""
    if a.value == b.value:
        return True
    digits = [number.last_digit for number in (a, b) if number.last_digit]
    if not digits or a.value.denominator == 1 or b.value.denominator == 1:
        return False
    last_digit = max(digits)
    return last_digit <= LAST_DIGIT * abs(b.value) and abs(a.value - b.value) < last_digit


def _constant(expression: Any) -> Number | None:
    """Return the value of an expression as a number, or None if it has letters or decimals."""
    if not getattr(expression, "is_real", False) or expression.has(sympy.Symbol, sympy.Float):
        return None
    return Number(Fraction(str(expression.evalf(40))))


SIGNS: list[tuple[re.Pattern[str], Any]] = [
    (re.compile(pattern), latex)
    for pattern, latex in [
        (r"[€£¥₹₩₽₺₫₪₱]", ""),
        (r"(?<![\w.\\])(\d+)\s+(\d+)\s*/\s*(\d+)", r"(\1+\\frac{\2}{\3})"),
        (rf"(?<![\w.\\])({NUMERAL})[eE]([+-]?\d+)(?!\w)", r"\1\\times 10^{\2}"),
        (r"\\?sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r"\^\s*([+-]?\d+)", r"^{\1}"),
        (r"\*", r"\\cdot "),
        (r"\\sqrt\s*\[\s*([3579])\s*\]\s*\{\s*-", r"-\\sqrt[\1]{"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        # math-verify reads all letters as small ones.
        (
            r"(\\(?:Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![A-Za-z])"
            r"|(?<![\\a-z])(?<!bb\{)(?<!cal\{)[A-Z](?![a-z]))(?:_(?:\{(\w+)\}|(\w)))?",
            lambda capital: f"{capital[1].lower()}_{{cap{capital[2] or capital[3] or ''}}}",
        ),
        (r"°|\$", ""),
        (r"%", r"\\%"),
    ]
]


@lru_cache(maxsize=4096)
def _read(text: str) -> Any | None:
    """Return the expression of sympy that a text is, or None."""
    if WORDS.search(text):
        return None
    union = re.search(r"\bor\b", text)
    for pattern, latex in SIGNS:
        text = pattern.sub(latex, text)
    if HUGE.search(text):
        return None
    if text.count("\\pm") == 1 and "," not in text:
        text = ",".join(text.replace("\\pm", sign) for sign in "+-")
    parsed = math_verify.parse(f"${text}$", [_latex()], parsing_timeout=None)
    if not parsed or isinstance(parsed[0], str):
        return None
    return _solved(parsed[0], is_union=bool(union))


@lru_cache(maxsize=1)
def _latex() -> LatexExtractionConfig:
    # With units it would read 3c as 3.
    config = LatexExtractionConfig()
    form = replace(config.normalization_config, units=False, boxed="none")
    return replace(config, normalization_config=form)


@lru_cache(maxsize=1)
def load_grammar() -> None:
    """Read a first expression, which takes a second or more: no answer is to pay for it."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it reports what it cannot read
    math_verify.parse(r"$\frac{x}{2}+1$", parsing_timeout=LOAD_TIMEOUT_S)


def _solved(expression: Any, *, is_union: bool) -> Any:
    """Return the set of the inequalities in one variable, or the expression."""
    if isinstance(expression, sympy.Complement):
        return expression.doit()
    parts = expression.args if isinstance(expression, sympy.FiniteSet) else [expression]
    if not all(
        isinstance(part, Relational | sympy.And) and not isinstance(part, sympy.Eq)
        for part in parts
    ):
        return expression
    if len({symbol for part in parts for symbol in part.free_symbols}) != 1:
        return expression
    try:
        sets = [part.as_set() for part in parts]
        return sympy.Union(*sets) if is_union else sympy.Intersection(*sets)
    except UNREADABLE:
        return expression


def _agree(a: Any, b: Any) -> bool:
    """Return True if two expressions are equal, or the members of two collections."""
    if isinstance(a, sympy.Eq) != isinstance(b, sympy.Eq):
        a, b = _without_name(a), _without_name(b)
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq):
        if a.lhs == b.lhs:
            return _agree(a.rhs, b.rhs)
        return _are_proportional(a.lhs - a.rhs, b.lhs - b.rhs, signs=(-1, 1))
    if isinstance(a, Relational) and isinstance(b, Relational):
        a, b = a.reversed if "<" in a.rel_op else a, b.reversed if "<" in b.rel_op else b
        is_same = type(a) is type(b)
        return is_same and _are_proportional(a.lhs - a.rhs, b.lhs - b.rhs, signs=(1,))
    (kind, members), (other_kind, others) = _members(a), _members(b)
    if kind and not other_kind and len(members) == 1:
        return _agree(members[0], b)
    if kind != other_kind or len(members) != len(others):
        return False
    if kind in ("set", "union", "chain"):
        return _pair_up(members, list(others))
    if kind:
        return all(_agree(x, y) for x, y in zip(members, others, strict=True))
    return _same_values(a, b)


def _without_name(expression: Any) -> Any:
    is_named = isinstance(expression, sympy.Eq) and isinstance(expression.lhs, sympy.Symbol)
    return expression.rhs if is_named else expression


def _members(expression: Any) -> tuple[str, Sequence[Any]]:
    """Return the kind of a collection and its members; none of a plain expression."""
    if isinstance(expression, sympy.MatrixBase):
        return f"matrix {expression.shape}", expression.flat()
    if isinstance(expression, sympy.FiniteSet):
        return "set", expression.args
    if isinstance(expression, sympy.Union):
        return "union", expression.args
    if isinstance(expression, sympy.And):
        return "chain", expression.args
    if isinstance(expression, sympy.Tuple):
        return "tuple", expression.args
    if isinstance(expression, sympy.Interval):
        ends = (bool(expression.left_open), bool(expression.right_open))
        # An open interval is written as a pair is.
        kind = "tuple" if all(ends) else f"interval {ends}"
        return kind, (expression.start, expression.end)
    return "", ()


def _pair_up(members: Sequence[Any], others: list[Any]) -> bool:
    """Return True if each member equals another one of the others."""
    for member in members:
        found = next((other for other in others if _agree(member, other)), None)
        if found is None:
            return False
        others.remove(found)
    return True


def _same_values(a: Any, b: Any) -> bool:
    """Return True if two expressions have the same values where both are real, or everywhere."""
    if a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return False
    a, b = a.doit(), b.doit()
    if a == b or (isinstance(a, sympy.Rational) and isinstance(b, sympy.Rational)):
        return bool(a == b)
    is_exact = sympy.Integer in (type(a), type(b)) or not (a.has(sympy.Float) or b.has(sympy.Float))
    tolerance = EXACT_TOLERANCE if is_exact else TOLERANCE
    pairs = [pair for pair in _samples(a, b) if None not in pair]
    real = [pair for pair in pairs if all(abs(x.imag) <= 1e-20 * abs(x) for x in pair)]
    pairs = real if len(real) > 1 or len(real) == len(pairs) else pairs
    return bool(pairs) and all(abs(x - y) <= tolerance * max(abs(x), abs(y)) for x, y in pairs)


def _are_proportional(a: Any, b: Any, *, signs: tuple[int, ...]) -> bool:
    """Return True if a is the same multiple of b at all points, with one of the signs."""
    samples = _samples(a.doit(), b.doit())
    ratios = [x / y for x, y in samples if x is not None and y is not None and abs(y) > 1e-12]
    if not ratios or abs(ratios[0]) < 1e-12:
        return False
    sign = 1 if ratios[0].real > 0 else -1
    return sign in signs and all(abs(r - ratios[0]) <= TOLERANCE * abs(r) for r in ratios)


def _samples(a: Any, b: Any) -> list[tuple[Any, Any]]:
    """Return the values of two expressions at the same points; None where one has none."""
    names = sorted({symbol.name for symbol in a.free_symbols | b.free_symbols} - {"i"})
    points = []
    for index in range(NUM_POINTS if names else 1):
        draw = random.Random(index)
        point = {
            name: sympy.Rational(draw.choice([-1, 1]) * draw.randint(50, 300), 97) for name in names
        }
        points.append({**point, "i": sympy.I})
    return [(_value_at(a, point), _value_at(b, point)) for point in points]


def _value_at(expression: Any, point: dict[str, Any]) -> Any | None:
    """Return the value of an expression as a complex number of mpmath, or None."""
    values = {symbol: point[symbol.name] for symbol in expression.free_symbols}
    value = expression.subs(values).evalf(25)
    if not value.is_number or value.has(sympy.nan, sympy.zoo):
        return None
    with mpmath.workdps(25):
        return mpmath.mpmathify(value)
