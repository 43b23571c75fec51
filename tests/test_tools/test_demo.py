"""The demo from end to end on a handful of images."""
import json
import re
import subprocess
import sys
from pathlib import Path

import mmcv
import pytest

from tests.test_network import environment

ROOT = Path(__file__).parents[2]
MODELS = ('convolution', 'SASA', 'ACmix')


def demo(folder, *options):
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'demo.py'), '--num-train', '16',
         '--num-val', '4', *options, '--cfg-options',
         'train_cfg.max_epochs=1', 'default_hooks.logger.interval=1'],
        cwd=folder, env=environment(folder), capture_output=True, text=True)
    # of a connection or lookup beyond this machine
    assert not (folder / 'attempts').exists()
    return done


@pytest.mark.slow
def test_demo_trains_compares_and_continues(tmp_path):
    done = demo(tmp_path)
    assert done.returncode == 0, done.stderr
    work_dir = tmp_path / 'work_dirs' / 'demo'
    for name in MODELS:
        assert re.search(rf'^\| {name} ', done.stdout, re.MULTILINE)
    results = json.loads((work_dir / 'results.json').read_text())
    assert [m['model'] for m in results['models']] == list(MODELS)
    assert all(m['status'] == 'finished' for m in results['models'])
    assert all(m['training_seconds'] > 0 for m in results['models'])
    assert results['models'][0]['params'] == 999_994
    for picture in ('curves.png', 'detections.png'):
        assert mmcv.imread(str(work_dir / picture)).std() > 5

    # killed while the last model was evaluated: only its epoch is repeated
    for log in (work_dir / 'ACmix').glob('*/vis_data/scalars.json'):
        lines = log.read_text().splitlines()
        log.write_text('\n'.join(x for x in lines if '"loss"' in x))
    again = demo(tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count('trained already') == 2
    assert 'ACmix: 1 epochs' in again.stdout
    assert 'unfinished' not in again.stdout

    other = demo(tmp_path, '--seed', '1')
    assert other.returncode == 1
    assert 'a run of another config, data set or seed' in other.stderr
    sizes = demo(tmp_path, '--num-train', '17')
    assert sizes.returncode == 1 and 'data_root must be' in sizes.stderr


@pytest.mark.slow
def test_failing_training_shows_the_end_of_its_log(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tools' / 'demo.py'), '--num-train', '8',
         '--num-val', '2', '--cfg-options', 'train_cfg.type=Nonsense'],
        cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert 'The training of convolution failed (exit status 1)' in done.stderr
    assert 'Nonsense is not in the ' in done.stderr, done.stderr
