"""Broken checkpoints, logs and annotations, and odd command lines."""
import contextlib
import functools
import importlib.util
import io
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import mmdet.models
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from mmengine.runner import CheckpointLoader

from acmix_det.checkpoints import convert_acmix
from acmix_det.datasets.check_coco import LEVELS, check_coco
from acmix_det.evaluation import Schedule, read_run
from acmix_det.evaluation.report import Entry, as_csv, as_dict, table
from acmix_det.evaluation.runs import AP50, MAP
from acmix_det.layers import ACmix2d
from acmix_det.models import (SAN, ACmixPyramidVisionTransformer, ACmixResNet,
                              ACmixSAN, ACmixSwinTransformer, SASAResNet)
from tests.test_checkpoints import (released_layer, released_resnet,
                                    released_swin)
from tests.test_fuzz.hostile import HOSTILE, examples, innermost
from tests.test_models.test_swin import TWO_STAGES

TOOLS = Path(__file__).parents[2] / 'tools'

# any JSON, with the numbers and texts that files are broken by
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3),
    st.sampled_from([2**63, -2**63, 10**400, 1e300, math.nan, math.inf, '',
                     'x', '\0', '\ud800', '../x', '1', 'x' * 300]),
    st.floats(), st.text(max_size=3))
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(['step', 'loss', 'id', 'bbox', 'x', '']), inner,
        max_size=3), max_leaves=5)


def spoil(data, value, chance=9):
    """A nested value with some of its parts replaced or left out."""
    if data.draw(st.integers(0, chance)) == 0:
        return data.draw(anything)
    if isinstance(value, dict):
        return {
            key: spoil(data, child, chance) for key, child in value.items()
            if data.draw(st.integers(0, 3 * chance))
        }
    if isinstance(value, list):
        return [spoil(data, child, chance) for child in value]
    return value


# --- checkpoints

SHAPES = ((), (0, ), (1, ), (3, ), (2, 3), (9, 6), (1, 8, 9, 3, 3), (2, 0, 1))
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)


@functools.lru_cache(maxsize=None)
def states():
    """Checkpoints of every kind by name, with the model that reads them."""
    torch.manual_seed(0)
    resnet = dict(depth=18, base_channels=8, stem_channels=8)
    pvt = dict(embed_dims=8, num_stages=2, num_layers=[1, 1],
               num_heads=[1, 2], patch_sizes=[4, 2], strides=[4, 2],
               sr_ratios=[2, 1], mlp_ratios=[2, 2], out_indices=[0, 1])
    san = dict(depth=10, base_channels=32, attn_kernel_sizes=[3] * 5)
    plain = mmdet.models.SwinTransformer(**TWO_STAGES)
    return dict(
        layer=(released_layer(), ACmix2d, None),
        resnet=(released_resnet(ACmixResNet(**resnet)), ACmixResNet, resnet),
        conv=(mmdet.models.ResNet(**resnet).state_dict(), SASAResNet, resnet),
        swin=(released_swin(), ACmixSwinTransformer, TWO_STAGES),
        plain_swin=(plain.state_dict(), ACmixSwinTransformer, TWO_STAGES),
        pvt=(mmdet.models.PyramidVisionTransformer(**pvt).state_dict(),
             ACmixPyramidVisionTransformer, pvt),
        san=(SAN(**san).state_dict(), ACmixSAN, san))


def spoil_state(data, state):
    """Replace, drop, rename and add a few entries; wrap the rest."""
    state = dict(state)
    keys = sorted(state)
    for _ in range(data.draw(st.integers(0, 3))):
        key = data.draw(st.sampled_from(keys))
        how = data.draw(st.sampled_from(
            ['shape', 'shape', 'shape', 'drop', 'rename', 'value']))
        value = state.pop(key, None)
        if how == 'shape':
            state[key] = torch.ones(data.draw(st.sampled_from(SHAPES)),
                                    dtype=data.draw(st.sampled_from(DTYPES)))
        elif how == 'rename':
            state[data.draw(st.sampled_from(
                ['x', '', 'module.' + key, key + '.x', 3, None]))] = value
        elif how == 'value':
            state[key] = data.draw(st.sampled_from(
                [None, 3, 'x', {}, [1.], {'x': torch.ones(1)}, torch.nn.ReLU]))
    for wrap in data.draw(st.lists(st.sampled_from(
            ['state_dict', 'model', 'module.', 'backbone.', 'x']),
                                   max_size=2)):
        if wrap.endswith('.'):
            state = {f'{wrap}{k}': x for k, x in state.items()}
        else:
            state = {wrap: state, 'epoch': 3}
    return state


KINDS = ('layer', 'resnet', 'conv', 'swin', 'plain_swin', 'pvt', 'san')


@examples(150)
@given(st.data(), st.sampled_from(KINDS))
def test_broken_checkpoint_converts_or_says_what_is_wrong(data, kind):
    state = spoil_state(data, states()[kind][0])
    try:
        converted = convert_acmix(state)
    except (TypeError, ValueError) as error:
        assert 'state_dict' in str(error)
        return
    assert all(isinstance(key, str) and isinstance(x, torch.Tensor)
               for key, x in converted.items())


@examples(60)
@given(st.data(), st.sampled_from(KINDS[1:]),
       st.sampled_from(['Pretrained', 'WarmStart']),
       st.sampled_from([None, '', 'backbone', 'x.']))
def test_broken_checkpoint_loads_or_says_what_is_wrong(data, kind, start,
                                                       prefix):
    state, cls, arguments = states()[kind]
    state = spoil_state(data, state)
    model = cls(**arguments, init_cfg=dict(
        type=start, checkpoint='weights.pth', prefix=prefix))
    with mock.patch.object(CheckpointLoader, 'load_checkpoint',
                           return_value=state):
        try:
            model.init_weights()
        except (TypeError, ValueError) as error:
            assert any(x in str(error) for x in ('state_dict', 'init_cfg'))


@examples(30)
@given(st.data(), st.binary(max_size=40), st.integers(0, 2000))
def test_file_that_is_no_checkpoint_is_refused(data, junk, cut):
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, 'broken.pth')
    buffer = io.BytesIO()
    torch.save(dict(state_dict=released_layer()), buffer)
    content = bytearray(buffer.getvalue())
    how = data.draw(st.sampled_from(['junk', 'cut', 'overwritten']))
    if how == 'junk':
        content = junk
    elif how == 'cut':
        content = content[:cut]
    else:
        content[cut:cut + len(junk)] = junk
    path.write_bytes(content)
    target = path.with_name('ours.pth')
    with folder:
        try:
            run_main(load_tool('convert_checkpoint'), path, target)
        except SystemExit as stop:
            assert isinstance(stop.code, str) and str(path) in stop.code


# --- logs

LINES = [
    dict(lr=0.1, data_time=0.1, loss=1., time=0.5, epoch=1, iter=10, step=10),
    {MAP: 0.3, AP50: 0.5, 'coco/digit_precision': 0.4, 'step': 1, 'time': 1.},
    dict(loss=math.nan, time=0.5, epoch=2, iter=20, step=20),
    {MAP: 0.4, 'coco/digit_precision': -1., 'step': 2, 'time': 1.}]


def spoil_text(data, text):
    """Bytes: perhaps cut, or with something else in the middle."""
    content = text.encode('utf-8', 'surrogatepass')
    how = data.draw(st.sampled_from(['no', 'no', 'cut', 'junk']))
    if how == 'no':
        return content
    at = data.draw(st.integers(0, len(content)))
    junk = data.draw(st.binary(max_size=9)) if how == 'junk' else b''
    return content[:at] + junk + (content[at:] if how == 'junk' else b'')


@examples(200)
@given(st.data(), st.sampled_from([Schedule(2), Schedule(20, 'iteration', 10),
                                   Schedule(0), Schedule(2**63)]))
def test_broken_logs_are_read_as_far_as_possible(data, schedule):
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        for log in range(data.draw(st.integers(0, 2))):
            path = work_dir / str(log) / 'vis_data' / 'scalars.json'
            path.parent.mkdir(parents=True)
            lines = [spoil(data, line) for line in LINES]
            path.write_bytes(spoil_text(data, '\n'.join(
                map(json.dumps, lines))))
        for name in ('epoch_2.pth', 'iter_20.pth', '2.pth'):
            (work_dir / name).touch()
        pointer = data.draw(st.sampled_from(
            ['epoch_2.pth', '/x/iter_20.pth', '2.pth', 'latest.pth', '', '.',
             '..', '\0', 'x' * 300, '\ud800']))
        (work_dir / 'last_checkpoint').write_bytes(spoil_text(data, pointer))
        run = read_run(work_dir, schedule)
        assert run.done >= 0 and 0 <= run.seconds
        assert isinstance(run.status, str)
        for name in (MAP, AP50, 'loss'):
            steps, values = run.curve(name)
            assert steps == sorted(steps)
            assert all(value >= 0 for value in values)
            assert run.final(name) is None or run.final(name) >= 0
        assert run.best is None or run.best[0] >= 0
        entries = [Entry('run', [run], None, run.classes)]
        for text in (table(entries), as_csv(entries),
                     json.dumps(as_dict(entries))):
            assert 'run' in text


# --- annotations

COCO = dict(
    images=[dict(id=i, file_name=f'{i}.png', width=40, height=30)
            for i in range(2)],
    annotations=[dict(id=10 + i, image_id=i, category_id=1 + i,
                      bbox=[5, 6, 10, 12.5], area=125, iscrowd=0)
                 for i in range(2)],
    categories=[dict(id=1, name='cat'), dict(id=2, name='dog')])


@examples(200)
@given(st.data())
def test_broken_annotations_give_findings(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'set.json')
        path.write_bytes(spoil_text(data, json.dumps(spoil(data, COCO, 15))))
        report = check_coco(str(path), folder, ['cat', 'dog'])
        for finding in report.findings:
            assert finding.level in LEVELS and finding.count > 0
        json.dumps(report.as_dict())


# --- command lines


@functools.lru_cache(maxsize=None)
def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f'{name}.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def run_main(tool, *args):
    silent = io.StringIO()
    with mock.patch.object(sys, 'argv', ['tool', *map(str, args)]):
        with contextlib.redirect_stdout(silent):
            tool.main()


NAMES = [path.stem for path in sorted(TOOLS.glob('*.py'))
         if 'def parse_args' in path.read_text()]
WORDS = [*map(str, HOSTILE), *map(str, Path(__file__).parents[:1]), '/', '-',
         '--', '=', 'a=b', 'a.b=[1,', 'model.backbone=3', 'x.pth', __file__,
         'cpu', 'cuda:99', '\udcff', 'md']


@examples(200)
@given(st.data())
def test_command_lines_are_parsed_or_refused(data):
    name = data.draw(st.sampled_from(NAMES))
    tool = load_tool(name)
    options = sorted(set(re.findall(r"'(--?[a-z][\w-]*)'",
                                    Path(tool.__file__).read_text())))
    words = data.draw(st.lists(
        st.sampled_from(WORDS) | st.sampled_from(options), max_size=6))
    err = io.StringIO()
    with mock.patch.object(sys, 'argv', [name, *words]), \
            contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
        try:
            tool.parse_args()
        except SystemExit as stop:
            if stop.code:
                assert stop.code == 2 and 'error: ' in err.getvalue()
        except Exception as error:  # of --cfg-options
            if 'mmengine' not in innermost(error):
                raise
            event('of the host')
