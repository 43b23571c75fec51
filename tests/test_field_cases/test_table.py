"""docs/field_cases.md names every field case and tests that exist."""
import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
DOC = TESTS.parent / 'docs' / 'field_cases.md'
IDS = [
    f'F{number:02}' for number in (
        1, 2, 4, 5, 8, 9, 10, 11, 13, 14, 17, 18, 19, 20, 22, 23, 26, 27, 29,
        30, 31, 33, 34, 35, 38, 39, 40, 42, 44, 45, 46, 47, 49, 51, 52, 53, 55,
        57, 58, 60, 61, 63, 64, 65, 67, 69, 70, 71, 74, 75, 76, 77, 79, 81, 83,
        84, 86, 87, 88)
]


def rows():
    lines = DOC.read_text('utf-8').splitlines()
    cells = [[cell.strip() for cell in line.strip('|').split('|')]
             for line in lines if line.startswith('| F')]
    return {row[0]: row[1:] for row in cells}, [row[0] for row in cells]


@functools.lru_cache(maxsize=None)
def names_in(path):
    """Tests of a file, without importing it."""
    tree = ast.parse(path.read_text('utf-8'))
    return {node.name for node in tree.body
            if isinstance(node, ast.FunctionDef)
            and node.name.startswith('test_')}


def test_every_id_has_one_row_with_area_and_behaviour():
    table, ids = rows()
    assert ids == IDS
    for key, (area, behaviour, tests) in table.items():
        assert area and behaviour.endswith('.') and tests, key


def test_every_named_test_exists():
    table, _ = rows()
    for key, (_, _, tests) in table.items():
        named = re.findall(r'`([\w/]+\.py)::(\w+)`', tests)
        assert named and len(named) == tests.count('::'), key
        for path, name in named:
            assert name in names_in(TESTS / path), f'{key}: {path}::{name}'


def test_every_field_case_test_is_named_in_the_row_of_its_id():
    table, _ = rows()
    found = set()
    for path in Path(__file__).parent.glob('test_*.py'):
        for name in names_in(path):
            case = re.match(r'test_(f\d\d)_', name)
            if case:
                found.add(name)
                row = table[case.group(1).upper()][2]
                assert f'`test_field_cases/{path.name}::{name}`' in row, name
    assert len(found) > len(IDS)
