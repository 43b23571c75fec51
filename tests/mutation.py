"""Mutation testing: change one operator or number at a time, and see whether a test fails.

    pip install cosmic-ray pytest-cov
    python -m tests.mutation acmix_det/ops acmix_det/layers --out mutation

Cosmic Ray makes the mutants. Each runs in a fork that has torch imported already, against the tests that reach its line
(every test of its file for a line that runs at import), fastest first, until one fails. A second call with the same `--out`
goes on where the first stopped. Tests that start processes of their own see no mutant.
"""
import argparse
import difflib
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import coverage
import matplotlib.pyplot  # noqa: F401  These are here so that no fork has to import them again.
import mmcv.cnn  # noqa: F401
import mmengine.runner  # noqa: F401
import pytest
import torch._dynamo  # noqa: F401
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

TESTS = ['tests/test_ops', 'tests/test_layers', 'tests/test_models', 'tests/test_field_cases', 'tests/test_export.py']
# Kernels of Triton are compiled from their source, which a fork cannot change.
UNCHANGED = ('__init__.py', '_triton_kernels.py', 'triton_backend.py')
# One replacement for each operator of Python, not all ten that Cosmic Ray has.
OPERATORS = [
    'AddNot', 'ExceptionReplacer', 'NumberReplacer', 'RemoveDecorator', 'ReplaceAndWithOr', 'ReplaceBinaryOperator_Add_Sub',
    'ReplaceBinaryOperator_Div_Mul', 'ReplaceBinaryOperator_FloorDiv_Mul', 'ReplaceBinaryOperator_Mod_Add',
    'ReplaceBinaryOperator_Mul_Add', 'ReplaceBinaryOperator_Pow_Mul', 'ReplaceBinaryOperator_Sub_Add',
    'ReplaceComparisonOperator_Eq_NotEq', 'ReplaceComparisonOperator_GtE_Gt', 'ReplaceComparisonOperator_Gt_GtE',
    'ReplaceComparisonOperator_IsNot_Is', 'ReplaceComparisonOperator_Is_IsNot', 'ReplaceComparisonOperator_Lt_LtE',
    'ReplaceComparisonOperator_NotEq_Eq', 'ReplaceContinueWithBreak', 'ReplaceFalseWithTrue', 'ReplaceOrWithAnd',
    'ReplaceTrueWithFalse', 'ReplaceUnaryOperator_Delete_Not', 'ReplaceUnaryOperator_Delete_USub', 'ZeroIterationForLoop',
]


class MutantImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import one module from changed source."""

    def __init__(self, path, source):
        self.path = os.path.abspath(path)
        self.name = '.'.join(Path(path).with_suffix('').parts)
        self.source = source

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def exec_module(self, module):
        exec(compile(self.source, self.path, 'exec'), module.__dict__)


class Durations:
    """Pytest plugin that writes the seconds of every passed test."""

    def __init__(self, path):
        self.path = path
        self.seconds = {}

    def pytest_runtest_logreport(self, report):
        if report.when == 'call' and report.passed:
            self.seconds[report.nodeid] = report.duration

    def pytest_sessionfinish(self):
        self.path.write_text(json.dumps(self.seconds))


def start_pytest(args, log, importer=None, plugins=()):
    """Fork and run pytest there. Return the id of the process, which leads a group of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        os.setsid()
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        if importer:
            sys.meta_path.insert(0, importer)
        code = int(pytest.main([*args, '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist'], plugins=list(plugins)))
    finally:
        os._exit(code)


def measure_coverage(folders, out):
    """Record which tests reach which line, and how long each takes."""
    os.environ['COVERAGE_FILE'] = str(out / 'coverage.sqlite')
    pid = start_pytest([*TESTS, *(f'--cov={folder}' for folder in folders), '--cov-context=test', '--cov-report=',
                        '-m', 'not slow and not gpu'], out / 'coverage.log', plugins=[Durations(out / 'seconds.json')])
    os.waitpid(pid, 0)


def read_coverage(out):
    """Return {path: {line: {test}}} and {test: seconds}."""
    seconds = json.loads((out / 'seconds.json').read_text())
    data = coverage.CoverageData(str(out / 'coverage.sqlite'))
    data.read()
    covered = {}
    for path in data.measured_files():
        covered[os.path.relpath(path)] = {
            line: {context.split('|')[0] for context in contexts} & seconds.keys()
            for line, contexts in data.contexts_by_lineno(path).items()}
    return covered, seconds


def find_mutants(folders):
    """Yield (path, operator, occurrence, line) of every mutant."""
    for path in sorted(path for folder in folders for path in Path(folder).glob('*.py')):
        if path.name in UNCHANGED:
            continue
        tree = get_ast(path.read_text())
        for name in OPERATORS:
            operator = get_operator(f'core/{name}')()
            places = [start for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)]
            for occurrence, (line, _) in enumerate(places):
                yield str(path), name, occurrence, line


def make_mutant(path, name, occurrence):
    """Return the changed source and its difference."""
    source = Path(path).read_text()
    mutant = mutate_code(source, get_operator(f'core/{name}')(), occurrence)
    lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), lineterm='', n=0)
    return mutant, [line for line in lines if line[0] in '+-' and line[:3] not in ('+++', '---')]


def select_tests(path, line, covered, seconds, budget):
    """The fastest tests that reach a line, `budget` seconds in all; those of the whole file if none does."""
    lines = covered.get(path, {})
    tests = lines.get(line) or set().union(*lines.values()) if lines else set()
    chosen, total = [], 0
    for test in sorted(tests, key=seconds.get):
        total += seconds[test]
        if chosen and total > budget:
            break
        chosen.append(test)
    return chosen, total


def run_mutants(mutants, covered, seconds, out, args):
    """Run every mutant and write one line of JSON for each."""
    running = {}
    with open(out / 'results.jsonl', 'a') as results:

        def collect():
            for pid, (mutant, diff, deadline) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                outcome = None
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    outcome = 'survived' if code == 0 else 'killed'
                elif time.time() > deadline:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    outcome = 'timeout'
                if outcome:
                    del running[pid]
                    results.write(json.dumps(dict(mutant=mutant, diff=diff, outcome=outcome)) + '\n')
                    results.flush()
            time.sleep(0.05)

        for mutant in mutants:
            path, name, occurrence, line = mutant
            source, diff = make_mutant(path, name, occurrence)
            tests, total = select_tests(path, line, covered, seconds, args.budget)
            if not tests:
                results.write(json.dumps(dict(mutant=mutant, diff=diff, outcome='not covered')) + '\n')
                continue
            while len(running) >= args.jobs:
                collect()
            pid = start_pytest([*tests, '-x'], os.devnull, MutantImporter(path, source))
            running[pid] = (mutant, diff, time.time() + 60 + 5 * total)
        while running:
            collect()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('folders', nargs='+')
    parser.add_argument('--out', type=Path, required=True, help='folder of coverage and results')
    parser.add_argument('--jobs', type=int, default=os.cpu_count(), help='mutants at a time')
    parser.add_argument('--count', type=int, help='this many mutants, a random choice (default: all)')
    parser.add_argument('--budget', type=float, default=60, help='seconds of tests for one mutant at most')
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / 'seconds.json').is_file():
        measure_coverage(args.folders, args.out)
    covered, seconds = read_coverage(args.out)
    path = args.out / 'results.jsonl'
    done = {tuple(json.loads(line)['mutant']) for line in path.read_text().splitlines()} if path.is_file() else set()
    mutants = list(find_mutants(args.folders))
    random.Random(0).shuffle(mutants)
    run_mutants([m for m in mutants[:args.count] if m not in done], covered, seconds, args.out, args)
    results = [json.loads(line) for line in path.read_text().splitlines()]
    for outcome in sorted({result['outcome'] for result in results}):
        print(outcome, sum(result['outcome'] == outcome for result in results))
    for result in results:
        if result['outcome'] in ('survived', 'not covered'):
            print('{0[0]}:{0[3]} {0[1]}'.format(result['mutant']), *result['diff'], sep='\n    ')


if __name__ == '__main__':
    main()
