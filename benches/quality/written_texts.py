"""Problems of arithmetic and short dialogues, written by rules for the texts that ship with loopq."""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Iterator

_NAMES = (
    "Amira",
    "Ben",
    "Chen",
    "Dorota",
    "Emeka",
    "Farah",
    "Goran",
    "Hana",
    "Ines",
    "Jonas",
    "Kofi",
    "Lena",
)
_THINGS = ("apples", "bolts", "books", "candles", "chairs", "eggs", "pencils", "plates", "shirts", "tickets")
_PLACES = ("the market", "the library", "a workshop", "the station", "the school", "a bakery", "the harbour")
_WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "jetty", "kayak", "larch", "maple",
    "north", "ocean", "pearl",
)  # fmt: skip
#: Problems or turns of a passage.
_LENGTH = 9


def problems(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Passages of problems with their solutions, without end."""
    while True:
        chosen = [rng.choice(_PROBLEMS)(rng) for _ in range(_LENGTH)]
        yield (
            "loopq problems",
            "\n\n".join(f"Problem {n}. {q}\nSolution. {a}" for n, (q, a) in enumerate(chosen, 1)),
        )


def dialogues(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Dialogues of a user and an assistant, without end."""
    marks = (("User: ", "Assistant: "), ("Question: ", "Answer: "), ("### Instruction\n", "### Response\n"))
    while True:
        user, assistant = rng.choice(marks)
        chosen = [rng.choice((*_PROBLEMS, *_REQUESTS))(rng) for _ in range(_LENGTH)]
        yield "loopq dialogues", "\n\n".join(f"{user}{q}\n{assistant}{a}" for q, a in chosen)


def _purchase(rng: random.Random) -> tuple[str, str]:
    name, thing, place = rng.choice(_NAMES), rng.choice(_THINGS), rng.choice(_PLACES)
    count, cents, paid = rng.randint(2, 40), rng.randint(15, 995), rng.choice((50, 100, 200, 500))
    total = count * cents
    question = (
        f"{name} buys {count} {thing} at {place}. Each costs ${cents / 100:.2f}. {name} pays with ${paid}. How much "
        "is missing or comes back?"
    )
    rest = 100 * paid - total
    end = f"comes back: ${rest / 100:.2f}" if rest >= 0 else f"is missing: ${-rest / 100:.2f}"
    steps = f"{count} x ${cents / 100:.2f} = ${total / 100:.2f}. ${paid}.00 - ${total / 100:.2f}"
    return question, f"{steps} = {'-' if rest < 0 else ''}${abs(rest) / 100:.2f}, so this {end}."


def _equation(rng: random.Random) -> tuple[str, str]:
    a, b, x = rng.randint(2, 19), rng.randint(-60, 60), rng.randint(-25, 25)
    sign, turned = ("+", "-") if b >= 0 else ("-", "+")
    c = a * x + b
    return (
        f"Solve {a}x {sign} {abs(b)} = {c}.",
        f"{a}x = {c} {turned} {abs(b)} = {a * x}, hence x = {a * x}/{a} = {x}. Check: {a} * {x} {sign} {abs(b)} = {c}.",
    )


def _sum(rng: random.Random) -> tuple[str, str]:
    numbers = [rng.randint(10, 9999) for _ in range(rng.randint(3, 6))]
    total, steps = numbers[0], []
    for number in numbers[1:]:
        steps.append(f"{total} + {number} = {total + number}")
        total += number
    mean = total / len(numbers)
    return (
        f"Find sum and mean of {', '.join(map(str, numbers))}.",
        f"{'; '.join(steps)}. The sum is {total:,}, and the mean is {total}/{len(numbers)} = {mean:.2f}.",
    )


def _speed(rng: random.Random) -> tuple[str, str]:
    hours, speed = rng.randint(2, 9), rng.randint(4, 130)
    way, minutes = hours * speed, rng.choice((15, 20, 30, 45))
    return (
        f"A train leaves {rng.choice(_PLACES)} and covers {way} km in {hours} hours. How far does it get in {minutes} "
        "minutes at that speed?",
        f"Its speed is {way} / {hours} = {speed} km/h. In {minutes} minutes it covers {speed} * {minutes}/60 = "
        f"{speed * minutes / 60:.2f} km.",
    )


def _share(rng: random.Random) -> tuple[str, str]:
    whole, percent = rng.randint(2, 90) * 50, rng.randint(1, 19) * 5
    part = whole * percent / 100
    return (
        f"What is {percent}% of {whole:,}, and what remains?",
        f"{percent}% of {whole:,} is 0.{percent:02d} * {whole:,} = {part:g}. What remains is {whole - part:g}.",
    )


def _days(rng: random.Random) -> tuple[str, str]:
    first = datetime.date(rng.randint(1850, 2040), rng.randint(1, 12), rng.randint(1, 28))
    n_days = rng.randint(9, 400)
    last = first + datetime.timedelta(days=n_days)
    return (
        f"Which date is {n_days} days after {first.isoformat()}?",
        f"It is {last.isoformat()}, a {last:%A}. The first date is a {first:%A}, and {n_days} days are {n_days // 7} "
        f"weeks and {n_days % 7} days.",
    )


def _sorting(rng: random.Random) -> tuple[str, str]:
    words = rng.sample(_WORDS, rng.randint(4, 8))
    return (
        f"Please put these words in alphabetical order: {', '.join(words)}.",
        "Here they are:\n" + "\n".join(f"{n}. {word}" for n, word in enumerate(sorted(words), 1)),
    )


def _function(rng: random.Random) -> tuple[str, str]:
    word, limit, step = rng.choice(_WORDS), rng.randint(5, 60), rng.randint(2, 7)
    multiples = list(range(0, limit, step))
    return (
        f"Write a Python function `{word}` that returns every multiple of {step} below {limit}.",
        f"```python\ndef {word}() -> list[int]:\n    return [n for n in range({limit}) if n % {step} == 0]\n```\n"
        f"`{word}()` gives {multiples}, and `sum({word}())` is {sum(multiples)}.",
    )


def _meeting(rng: random.Random) -> tuple[str, str]:
    one, other = rng.sample(_NAMES, 2)
    hour, minute, length = rng.randint(8, 17), rng.choice((0, 10, 15, 30, 40)), rng.choice((25, 50, 75, 90))
    end = 60 * hour + minute + length
    place = rng.choice(_PLACES)
    return (
        f"Hi! {one} wants to meet {other} at {place} at {hour}:{minute:02d}. They need {length} minutes. When are they "
        "done, and can you write a short message?",
        f'They are done at {end // 60}:{end % 60:02d}. A message: "Dear {other}, shall we meet at {place} at '
        f'{hour}:{minute:02d}? I think {length} minutes will be enough. See you there, {one}"',
    )


def _record(rng: random.Random) -> tuple[str, str]:
    name, thing, count = rng.choice(_NAMES), rng.choice(_THINGS), rng.randint(1, 900)
    return (
        f"Turn this into JSON: {name} ordered {count} {thing} for {rng.choice(_PLACES)}.",
        f'{{"customer": "{name}", "item": "{thing}", "quantity": {count}, "paid": {str(count % 2 == 0).lower()}}}',
    )


Writer = Callable[[random.Random], tuple[str, str]]
_PROBLEMS: tuple[Writer, ...] = (_purchase, _equation, _sum, _speed, _share)
_REQUESTS: tuple[Writer, ...] = (_days, _sorting, _function, _meeting, _record)
