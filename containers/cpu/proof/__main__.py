"""Command line of the package; see there."""

import os
import sys
from pathlib import Path

sys.path[0] = os.fspath(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    if sys.argv[1] == "--reference":
        from proof import reference

        reference.make(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "--mutants":
        from proof import mutants

        sys.exit(mutants.main(*(Path(word) for word in sys.argv[2:5]), sys.argv[5]))
    else:
        from proof import serve

        status = serve.main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # taking thousands of modules down costs 5 s and shows nothing; an exception ends as ever
