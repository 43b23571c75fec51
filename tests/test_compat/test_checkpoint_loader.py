import itertools
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.runner import CheckpointLoader, Runner

NUMBERS = itertools.count()


class Line(BaseModel):

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 1)

    def forward(self, x, y, mode='loss'):
        out = self.fc(x).squeeze(1)
        return dict(loss=(out - y).square().mean()) if mode == 'loss' else out


class Mean(BaseMetric):
    default_prefix = 'output'

    def process(self, data_batch, data_samples):
        self.results.append(float(data_samples[0]))

    def compute_metrics(self, results):
        return dict(mean=float(np.mean(results)))


def make_runner(work_dir, **kwargs):
    loader = dict(dataset=[(torch.randn(2), torch.tensor(1.0)) for _ in range(4)], batch_size=2,
                  sampler=dict(type='DefaultSampler', shuffle=False),
                  collate_fn=dict(type='default_collate'), num_workers=0)
    return Runner(
        model=Line(), work_dir=str(work_dir), train_dataloader=loader, val_dataloader=loader,
        optim_wrapper=dict(optimizer=dict(type='AdamW', lr=0.1)),
        param_scheduler=dict(type='MultiStepLR', milestones=[1]),
        val_evaluator=[Mean()], val_cfg=dict(), default_scope='mmengine',
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=1, save_best='output/mean',
                                           rule='greater')),
        experiment_name=f'checkpoint_loader_{next(NUMBERS)}', **kwargs)


def epochs(n):
    return dict(by_epoch=True, max_epochs=n, val_interval=1)


def test_training_resumes_from_its_own_checkpoint(tmp_path, monkeypatch):
    monkeypatch.delenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', raising=False)
    first = make_runner(tmp_path, train_cfg=epochs(1))
    first.train()
    assert first.iter == 2
    second = make_runner(tmp_path, train_cfg=epochs(2), resume=True)
    second.load_or_resume()
    assert (second.epoch, second.iter) == (1, 2)
    history = second.message_hub.get_scalar('train/loss').data[0]
    assert len(history) == 2 and np.isfinite(history).all()
    for name, value in first.model.state_dict().items():
        torch.testing.assert_close(second.model.state_dict()[name], value)
    second.train()
    assert second.iter == 4


def test_best_checkpoint_loads_for_testing(tmp_path):
    make_runner(tmp_path, train_cfg=epochs(1)).train()
    best, = tmp_path.glob('best_*.pth')
    checkpoint = CheckpointLoader.load_checkpoint(str(best), map_location='cpu')
    assert set(checkpoint['state_dict']) == {'fc.weight', 'fc.bias'}


def save_history(path):
    buffer = HistoryBuffer()
    buffer.update(0.5)
    buffer.update(1.5, 3)
    scalars = {code: np.dtype(code).type(1) for code in '?bBhHiIlLqQefdFD'}
    torch.save(dict(history=buffer, scalars=scalars, array=np.arange(3, dtype=np.float32)), path)


def load(path):
    return CheckpointLoader.load_checkpoint(str(path), map_location='cpu')


def test_log_buffers_and_numpy_values_come_back(tmp_path):
    save_history(tmp_path / 'a.pth')
    loaded = load(tmp_path / 'a.pth')
    assert loaded['history'].data[0].tolist() == [0.5, 1.5]
    assert loaded['history'].statistics('mean') == 0.5
    assert loaded['history'].statistics('max') == 1.5
    assert all(value == 1 and value.dtype == np.dtype(code)
               for code, value in loaded['scalars'].items())
    assert loaded['array'].tolist() == [0, 1, 2] and loaded['array'].dtype == np.float32


@pytest.mark.parametrize('core', ['core', '_core'], ids=['numpy-1', 'numpy-2'])
def test_files_of_both_numpy_generations_load(core, tmp_path):
    save_history(tmp_path / 'a.pth')
    replaced = 0
    with zipfile.ZipFile(tmp_path / 'a.pth') as source, zipfile.ZipFile(tmp_path / 'b.pth', 'w') as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith('data.pkl'):
                for other in (b'core', b'_core'):
                    replaced += data.count(b'cnumpy.' + other + b'.multiarray\n')
                    data = data.replace(b'cnumpy.' + other + b'.multiarray\n',
                                        b'cnumpy.' + core.encode() + b'.multiarray\n')
            target.writestr(name, data)
    assert replaced
    assert load(tmp_path / 'b.pth')['history'].data[0].tolist() == [0.5, 1.5]


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def refused(path, payload):
    torch.save(dict(state_dict=dict(w=torch.ones(1)), payload=payload), path)
    with pytest.raises(pickle.UnpicklingError) as caught:
        load(path)
    message = str(caught.value)
    assert f'checkpoint {path} was not loaded' in message
    assert 'If you trust the file' in message and 'weights_only=False' in message
    assert 'TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1' in message
    return message


@pytest.mark.parametrize('function', [os.system, eval, exec], ids=['os.system', 'eval', 'exec'])
def test_functions_in_a_checkpoint_are_refused_by_name(function, tmp_path):
    code = f'touch {tmp_path}/ran' if function is os.system else f"open('{tmp_path}/ran', 'w')"
    message = refused(tmp_path / 'evil.pth', Call(function, code))
    name = 'posix.system' if function is os.system and os.name == 'posix' else function.__name__
    # torch 2.6 names the module of a built-in function too
    assert f'it uses {name}, and' in message.replace('builtins.', '')
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('owner, name', [
    (HistoryBuffer, '__init__'), (HistoryBuffer, 'register_statistics'), (HistoryBuffer, '__dict__'),
    (np.ndarray, 'tofile'), (np.dtype, '__subclasses__'),
    (HistoryBuffer([1.0], [1]), 'min'),
], ids=lambda value: getattr(value, '__name__', str(value)[:20]))
def test_getattr_reaches_nothing_but_the_statistics(owner, name, tmp_path):
    message = refused(tmp_path / 'evil.pth', Call(getattr, owner, name))
    assert 'it uses builtins.getattr, and' in message
    assert repr(name) in message


def test_statistics_methods_can_not_be_called_by_a_checkpoint(tmp_path):
    message = refused(tmp_path / 'evil.pth', Call(HistoryBuffer.max, HistoryBuffer([1.0], [1])))
    assert 'function HistoryBuffer.max' in message


def test_allow_list_ends_with_the_load(tmp_path):
    save_history(tmp_path / 'a.pth')
    load(tmp_path / 'a.pth')
    assert HistoryBuffer not in torch.serialization.get_safe_globals()
    with pytest.raises(pickle.UnpicklingError, match='HistoryBuffer'):
        torch.load(tmp_path / 'a.pth', weights_only=True)


def test_user_who_trusts_a_file_can_say_so(tmp_path, monkeypatch):
    torch.save(dict(payload=Call(len, 'abc')), tmp_path / 'trusted.pth')
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')
    with pytest.warns(UserWarning, match='TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'):
        assert load(tmp_path / 'trusted.pth')['payload'] == 3


@pytest.mark.parametrize('content', [b'', b'PK', b'h', b'q', b'r\x01', b'no checkpoint', b'\x80\x02}q\x00('], ids=repr)
def test_bytes_that_are_no_checkpoint_are_named(content, tmp_path):
    (tmp_path / 'x.pth').write_bytes(content)
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match='checkpoint .*x.pth (cannot be read|was not loaded)'):
        load(tmp_path / 'x.pth')


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='nothing.pth can not be found'):
        load(tmp_path / 'nothing.pth')
