"""A training that is killed, and a checkpoint that is cut off."""
import re
import signal

import pytest
import torch

from acmix_det.compat.checkpoint_loader import load_from_local
from acmix_det.compat.faults import FaultError
from acmix_det.datasets import make_digits
from tests.test_tools.digits_training import start, write_config


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp('interrupted')
    make_digits(str(folder / 'digits'), num_train=24, num_val=4,
                image_size=96)
    return write_config(folder / 'config.py', folder / 'digits',
                        'retinanet_r18-acmix_fpn-acmix_digits')


def finish(process):
    out = process.communicate()[0]
    assert process.returncode == 0, out[-4000:]
    return out


@pytest.mark.slow
def test_killed_training_resumes_to_the_same_weights(config, tmp_path):
    finish(start(config, tmp_path / 'whole'))
    process = start(config, tmp_path / 'killed')
    for line in process.stdout:
        if 'Epoch(train) [2][3/6]' in line:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert process.returncode == -signal.SIGKILL
    out = finish(start(config, tmp_path / 'killed', '--resume'))
    assert 'resumed epoch: 1, iter: 6' in out
    assert len(re.findall(r'Epoch\(train\) \[2\]', out)) == 6
    whole, resumed = (
        load_from_local(str(tmp_path / name / 'epoch_2.pth'))
        for name in ('whole', 'killed'))
    for key, value in whole['state_dict'].items():
        torch.testing.assert_close(resumed['state_dict'][key], value,
                                   rtol=1e-4, atol=1e-6, msg=key)
    steps = [
        {s['step'].item() for s in x['optimizer']['state'].values()}
        for x in (whole, resumed)
    ]
    assert steps == [{12.}, {12.}]


@pytest.mark.parametrize('kept', [0, 100, 5000])
def test_cut_checkpoint_is_named(kept, tmp_path):
    path = tmp_path / 'epoch_1.pth'
    torch.save(dict(state_dict=dict(x=torch.rand(5000))), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(FaultError, match='epoch_1.pth cannot be read'):
        load_from_local(str(path))
