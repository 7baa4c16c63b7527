"""Apply a chat template in a process of its own: it is code of a checkpoint, which may never end or fill the memory.

The process runs this file. It reads a pickled tokenizer and dialogues, and writes a line of JSON for each.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopq.errors import CalibrationError, LoopqError, model_code

#: Seconds and further bytes that the template may take for a dialogue, and bytes of the text that it makes.
SECONDS, MEMORY, MAX_TEXT = 10.0, 2**30, 2**24


def applied(tokenizer: Any, dialogues: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts that the chat template of a tokenizer makes of dialogues.

    Parameters
    ----------
    tokenizer : object
        Has the template. Its class can be pickled.
    dialogues : mapping of str to list
        Messages with "role" and "content", by file and line.

    Returns
    -------
    dict of str to str
        The texts, by the same places.

    Raises
    ------
    CalibrationError
        The template raises, never ends, takes too much memory or makes too long a text. The message names the place.
    """
    places = list(dialogues)
    with model_code(places[0], CalibrationError, "giving the tokenizer to another process"):
        given = pickle.dumps((tokenizer, dict(dialogues), SECONDS))
    path = os.pathsep.join(part or os.curdir for part in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "loopq.calibrate.template"],
        input=given,
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": path},
    )
    texts = []
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        if "error" in answer:
            raise CalibrationError(f"{answer['error']}; leave --set template=true out, or change the record")
        texts.append(answer["text"])
    if len(texts) < len(places):
        place = places[len(texts)]
        said = done.stderr.decode(errors="replace").strip().splitlines()
        if done.returncode > 0 and not any(line.startswith("Timeout") for line in said):
            raise CalibrationError(
                f"{place}: the process for the chat template failed ({said[-1] if said else done.returncode}); leave "
                "--set template=true out"
            )
        raise CalibrationError(
            f"{place}: the chat template of the tokenizer takes more than {SECONDS:g} s or {MEMORY / 2**30:g} GiB; "
            "leave --set template=true out"
        )
    return dict(zip(places, texts, strict=True))


def _answer(tokenizer: Any, messages: Any) -> str:
    last = messages[-1] if messages else None
    asks = isinstance(last, dict) and last.get("role") == "user"
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
    if len(text) > MAX_TEXT:
        raise ValueError(f"makes {len(text)} characters; allowed: {MAX_TEXT}")
    return text


def _limit_memory() -> None:
    """Let this process take `MEMORY` more bytes, where the system can say so."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # absent on Windows

        held = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


def main() -> None:
    """Answer each dialogue, or end in the one that takes too long."""
    tokenizer, dialogues, seconds = pickle.load(sys.stdin.buffer)
    _limit_memory()
    for place, messages in dialogues.items():
        # Its thread needs no lock of the interpreter, so that no code delays it.
        faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            with model_code(place, CalibrationError, "the chat template of the tokenizer"):
                answer = {"text": _answer(tokenizer, messages)}
        except MemoryError:
            answer = {"error": f"{place}: the chat template of the tokenizer takes more than {MEMORY} bytes"}
        except LoopqError as cause:
            answer = {"error": str(cause)}
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
