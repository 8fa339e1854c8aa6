"""Fill the model cache: `fetch_models.py QUESTION`, with an interpreter that has huggingface_hub.

QUESTION is JSON: {"models": [id], "result": path}. Each model is taken whole (snapshot_download); files that are there
are kept, one that was interrupted is fetched anew (huggingface_hub 1.33 resumes a file within one process only).
The answer is {id: {"path"} | {"error": {"kind", "text"}}} with kind gated, rate_limit, missing, disk or network; one
model that cannot be had stops no other, but a rate limit does: asking on would only make it last longer.
"""

import errno
import json
import os
import sys

SKIPPED = ["original/*", "*.gguf", "*.pth"]  # the same weights again in formats that nobody here loads


def kind_of(error: BaseException) -> str:
    """Return the word for what went wrong; the first status or error of the chain decides."""
    while error is not None:
        status = getattr(getattr(error, "response", None), "status_code", None)
        name = type(error).__name__
        if status == 429:
            return "rate_limit"
        if name == "GatedRepoError" or status in (401, 403):
            return "gated"
        if name in ("RepositoryNotFoundError", "RevisionNotFoundError") or status == 404:
            return "missing"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "disk"
        error = error.__cause__ or error.__context__
    return "network"


def main(argv: list) -> int:
    """Fetch one model after the other and write down what became of each."""
    with open(argv[0], encoding="utf-8") as source:
        question = json.load(source)
    from huggingface_hub import snapshot_download

    answers = {}
    for number, model in enumerate(question["models"], 1):
        print(f"[{number}/{len(question['models'])}] {model}", flush=True)
        try:
            answers[model] = {"path": snapshot_download(model, ignore_patterns=SKIPPED)}
        except Exception as error:  # noqa: BLE001
            text = (str(error).strip().splitlines() or [""])[0]
            answers[model] = {"error": {"kind": kind_of(error), "text": f"{type(error).__name__}: {text}"[:500]}}
            if answers[model]["error"]["kind"] == "rate_limit":
                break
    part = question["result"] + ".part"
    with open(part, "w", encoding="utf-8") as out:
        json.dump(answers, out, indent=1)
    os.replace(part, question["result"])
    return 0 if all("path" in answer for answer in answers.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
