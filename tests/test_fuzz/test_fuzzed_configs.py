"""Shipped configs, changed key by key.

Every key of our types is left out, misspelt, nested into itself, and set to
hostile values. The detector trains a step and predicts, or the error says what
is wrong. Errors that mmdet and mmengine raise for keys of their own are only
counted (``--hypothesis-show-statistics``).
"""
import contextlib
import copy
import functools
import os
import warnings
from collections.abc import Mapping

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

import acmix_det
from tests.test_fuzz.hostile import HOSTILE, examples, innermost
from tests.test_fuzz.tiny import CASES, run, tiny_model

PACKAGE = os.path.dirname(acmix_det.__file__)
PARTS = ('backbone', 'neck', 'bbox_head', 'rpn_head')
# keys that only we read, wherever they are
OURS = {'attn_cfg', 'stage_with_attn', 'attn_stem', 'depth'}
CHANGES = ('delete', 'misspell', 'nest')


def is_ours(name, path):
    """Is this a key that mmdet's classes do not have?"""
    keys = {key for key in path if isinstance(key, str)}
    return bool(keys & OURS) or (
        'init_cfg' in keys and path[-1] != 'type') or (
        'san' in name and path[0] == 'backbone' and not keys &
        {'type', 'norm_cfg', 'base_channels', 'out_indices'}) or (
        'conv_cfg' in path[:-1] and path[-1] != 'type')


def values_for(name, path):
    """Hostile values of a key."""
    if is_ours(name, path):
        return HOSTILE
    # a host builds as many layers as it is told
    return [x for x in HOSTILE if not isinstance(x, int) or x < 2**31]


def paths_of(value, path=()):
    """Every place in a nested config."""
    children = {}
    if isinstance(value, Mapping):
        children = value
    elif isinstance(value, (list, tuple)):
        children = dict(enumerate(value))
    for key, child in children.items():
        yield (*path, key)
        yield from paths_of(child, (*path, key))


@functools.lru_cache(maxsize=None)
def all_changes(name):
    """(path, change or index of a hostile value)."""
    found = []
    model = tiny_model(name)
    for part in PARTS:
        for path in paths_of(model.get(part), (part, )):
            if part in ('bbox_head', 'rpn_head') and not (
                    {'attn_cfg', 'conv_cfg'} & {*path}):
                continue
            count = len(values_for(name, path))
            found += [(path, what) for what in (*CHANGES, *range(count))]
    return found


def change(model, name, path, what):
    """Change a config in place."""
    *parents, key = path
    place = model
    for parent in parents:
        if isinstance(place[parent], tuple):
            place[parent] = list(place[parent])
        place = place[parent]
    if what == 'delete':
        del place[key]
    elif what == 'misspell':
        value = place[key]
        if isinstance(key, str):
            del place[key]
            place[f'{key}s'] = value
        else:
            place.append(value)
    elif what == 'nest':
        place[key] = {key: place[key]}
    else:
        place[key] = values_for(name, path)[what]


def outcome(name, changes):
    """'ran', or what went wrong: (whose, stage, error)."""
    model = copy.deepcopy(tiny_model(name))
    for path, what in changes:
        # the place of the second one may be gone
        with contextlib.suppress(LookupError, TypeError, AttributeError):
            change(model, name, path, what)
    stage = None
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        try:
            for stage in run(model):
                pass
        except Exception as error:
            ours = innermost(error).startswith(PACKAGE) or (
                len(changes) == 1 and is_ours(name, changes[0][0]))
            return ours, stage, error
    return 'ran'


def is_clear(stage, error, name, path):
    """Is this an error that says what is wrong, early enough?"""
    text = str(error)
    if isinstance(error, KeyError) and 'is not in the mmdet::' in text:
        return True  # no such type
    if isinstance(error, FileNotFoundError) and path[-1] == 'checkpoint':
        return True
    if not isinstance(error, (TypeError, ValueError)):
        return False
    if stage in ('loss', 'predict'):
        # what two parts have in common shows here first
        return text.startswith(('inputs must have one map for each of the ',
                                'x must have the shape '))
    if any(isinstance(key, str) and key in text for key in path[1:]):
        return True
    # a consequence of an argument of the host
    return not is_ours(name, path) and (
        ' must ' in text and ', got ' in text or 'check init_cfg' in text)


@pytest.mark.parametrize('name', CASES)
def test_unchanged_config_runs(name):
    assert list(run(tiny_model(name)))[-1] == 'predict'


@examples(40)
@given(st.data(), st.sampled_from([*CASES]), st.sampled_from([1, 1, 2]))
def test_config_with_changed_keys_runs_or_says_what_is_wrong(data, name,
                                                             count):
    changes = [data.draw(st.sampled_from(all_changes(name)))
               for _ in range(count)]
    result = outcome(name, changes)
    if result == 'ran':
        event('runs')
        return
    ours, stage, error = result
    event(f'{"ours" if ours else "of the host"}: {type(error).__name__}')
    assert not ours or any(
        is_clear(stage, error, name, path) for path, _ in changes), (
            f'{name}, {changes}: {stage} fails with {error!r}')
