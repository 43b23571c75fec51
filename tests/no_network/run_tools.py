"""Run tools one after the other in this process; write what they tried.

    python run_tools.py CALLS RESULTS

CALLS is a JSON file with a list of [tool, arguments]. RESULTS gets, for each
of them, the exit status or the error, and the refused attempts.
"""
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

TOOLS = Path(__file__).parents[2] / 'tools'


def run(tool, args):
    """Exit status, or how the tool failed."""
    sys.argv = [tool, *args]
    try:
        runpy.run_path(str(TOOLS / f'{tool}.py'), run_name='__main__')
    except SystemExit as done:
        return done.code or 0
    except Exception:
        return traceback.format_exc()
    return 0


def main():
    log = Path(os.environ['NETWORK_ATTEMPTS'])
    calls, results = map(Path, sys.argv[1:])
    found = []
    for tool, args in json.loads(calls.read_text()):
        log.write_text('')
        found.append([tool, run(tool, args), log.read_text().splitlines()])
        results.write_text(json.dumps(found))


if __name__ == '__main__':
    main()
