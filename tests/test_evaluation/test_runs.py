import json

import pytest
from mmengine.config import Config

from acmix_det.evaluation import (Schedule, find_config, read_run,
                                  read_schedule)


def write_log(work_dir, name, lines):
    folder = work_dir / name / 'vis_data'
    folder.mkdir(parents=True)
    (folder / 'scalars.json').write_text(
        '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in lines))


def train_line(step, time, epoch=1):
    return dict(loss=1., time=time, step=step, iter=step, epoch=epoch)


def val_line(epoch, value):
    return {'coco/bbox_mAP': value, 'step': epoch, 'time': 9., 'data_time': 9.}


def save(work_dir, epoch, kind='epoch'):
    path = work_dir / f'{kind}_{epoch}.pth'
    path.touch()
    (work_dir / 'last_checkpoint').write_text(f'/moved/from/here/{path.name}')
    return path


def test_finished_run(tmp_path):
    write_log(tmp_path, '1', [
        train_line(10, 0.5), train_line(15, 1.0), val_line(1, 0.4),
        train_line(25, 0.1, 2), val_line(2, 0.2)
    ])
    path = save(tmp_path, 2)
    run = read_run(tmp_path, Schedule(2))
    assert run.finished and run.status == 'finished'
    assert run.checkpoint == path and run.done == 2
    assert run.seconds == pytest.approx(10 * 0.5 + 5 * 1.0 + 10 * 0.1)
    assert run.final('coco/bbox_mAP') == 0.2
    assert run.best == (0.4, 1)
    assert run.curve('coco/bbox_mAP') == ([1, 2], [0.4, 0.2])


def test_repeated_iterations_of_a_resumed_run_count_once(tmp_path):
    write_log(tmp_path, '20261201_1', [
        train_line(10, 0.5), val_line(1, 0.2), train_line(15, 7., 2),
        train_line(20, 7., 2), '{"loss": 1.0, "time": 0.5, "st'
    ])
    write_log(tmp_path, '20261201_2',
              [train_line(20, 0.3, 2), val_line(2, 0.3)])
    save(tmp_path, 2)
    run = read_run(tmp_path, Schedule(2))
    assert run.finished
    assert run.seconds == pytest.approx(10 * 0.5 + 10 * 0.3)


def test_older_training_in_the_same_folder_does_not_count(tmp_path):
    write_log(tmp_path, '20261201_1', [
        train_line(10, 9.), val_line(1, 0.8), train_line(20, 9., 2),
        val_line(2, 0.9)
    ])
    write_log(tmp_path, '20261202_1', [train_line(10, 0.5), val_line(1, 0.2)])
    save(tmp_path, 1)
    run = read_run(tmp_path, Schedule(2))
    assert run.status == 'unfinished (1 of 2 epochs)'
    assert run.best == (0.2, 1) and run.seconds == pytest.approx(5.)


@pytest.mark.parametrize('saved, evaluated, status', [
    (None, 0, 'not started'), (1, 1, 'unfinished (1 of 2 epochs)'),
    (2, 1, 'trained, but not evaluated'),
    (1, 2, 'unfinished (1 of 2 epochs)')
])
def test_unfinished_runs_have_no_final_metric(tmp_path, saved, evaluated,
                                              status):
    write_log(tmp_path, '1', [val_line(e + 1, 0.1) for e in range(evaluated)])
    if saved:
        save(tmp_path, saved)
    run = read_run(tmp_path, Schedule(2))
    assert not run.finished and run.status == status
    assert run.final('coco/bbox_mAP') is None and not run.classes


def test_run_stopped_in_its_first_epoch_is_unfinished(tmp_path):
    write_log(tmp_path, '1', [train_line(10, 0.5)])
    run = read_run(tmp_path, Schedule(2))
    assert run.status == 'unfinished (less than 1 of 2 epochs saved)'


def test_checkpoint_that_is_gone_does_not_count(tmp_path):
    save(tmp_path, 2).unlink()
    run = read_run(tmp_path, Schedule(2))
    assert run.checkpoint is None and run.status == 'not started'


def test_evaluation_without_detections_is_an_evaluation(tmp_path):
    write_log(tmp_path, '1', [dict(step=1, time=1., data_time=1.)])
    save(tmp_path, 1)
    run = read_run(tmp_path, Schedule(1))
    assert run.finished and run.final('coco/bbox_mAP') is None
    assert run.best is None


def test_minus_one_of_coco_is_no_value(tmp_path):
    write_log(tmp_path, '1', [val_line(1, -1)])
    save(tmp_path, 1)
    run = read_run(tmp_path, Schedule(1))
    assert run.final('coco/bbox_mAP') is None
    assert run.best is None and run.curve('coco/bbox_mAP') == ([], [])


def test_logged_ap_by_class_is_read(tmp_path):
    write_log(tmp_path, '1', [
        {**val_line(1, 0.5), 'coco/a cat_precision': 0.25,
         'coco/dog_precision': float('nan')}
    ])
    save(tmp_path, 1)
    classes = read_run(tmp_path, Schedule(1)).classes
    assert classes == {'a cat': 0.25, 'dog': None}


@pytest.mark.parametrize('steps', [(0, 0), (1000, 1500)],
                         ids=['metrics by epoch', 'metrics by iteration'])
def test_iteration_based_run(tmp_path, steps):
    # the log interval (300) does not divide the evaluation interval (1000)
    write_log(tmp_path, '1', [
        *(train_line(i, 0.5) for i in (300, 600, 900)),
        {**val_line(0, 0.1), 'step': steps[0]}, train_line(1200, 0.5),
        {**val_line(0, 0.2), 'step': steps[1]}
    ])
    path = save(tmp_path, 1500, 'iter')
    schedule = Schedule(1500, 'iteration', 1000)
    run = read_run(tmp_path, schedule)
    assert run.finished and run.checkpoint == path
    assert run.curve('coco/bbox_mAP') == ([1000, 1500], [0.1, 0.2])
    save(tmp_path, 500, 'iter')
    assert (read_run(tmp_path, schedule).status
            == 'unfinished (500 of 1500 iterations)')


@pytest.mark.parametrize('line', [
    '[' * 10**5, '{"step": 1', '[1]', '{"step": "1", "loss": 1.0}',
    '{"step": null}', '{"step": -1, "time": 1.0}', '{"step": true}',
    f'{{"step": 1{"0" * 400}, "time": 1.0, "loss": 1.0}}',
    '{"step": 40, "loss": 1.0, "time": "x", "epoch": 3}',
    '{"step": 40, "loss": null, "time": 1.0, "epoch": 3}', '\udcff'],
    ids=lambda line: line[:30])
def test_lines_that_are_broken_are_left_out(tmp_path, line):
    write_log(tmp_path, '1', [train_line(10, 0.5), val_line(1, 0.4)])
    path = tmp_path / '1' / 'vis_data' / 'scalars.json'
    path.write_bytes(path.read_bytes() + b'\n' + line.encode(
        'utf-8', 'surrogateescape'))
    save(tmp_path, 1)
    run = read_run(tmp_path, Schedule(1))
    assert run.finished and run.final('coco/bbox_mAP') == 0.4
    assert run.seconds == pytest.approx(5.)


def test_values_that_are_no_finite_numbers_are_no_values(tmp_path):
    line = train_line(10, 0.5)
    del line['time'], line['epoch']
    write_log(tmp_path, '1', [
        line, {**val_line(1, 'x'), 'coco/bbox_mAP_50': float('inf')}])
    save(tmp_path, 1)
    run = read_run(tmp_path, Schedule(1))
    assert run.finished and run.seconds == 0
    assert run.final('coco/bbox_mAP') is None
    assert run.curve('coco/bbox_mAP_50') == ([], [])


@pytest.mark.parametrize('content', [b'\xff', b'\0', b'x' * 300, b'', b'..'],
                         ids=lambda x: repr(x[:5]))
def test_pointer_to_no_checkpoint_is_none(tmp_path, content):
    (tmp_path / 'last_checkpoint').write_bytes(content)
    assert read_run(tmp_path, Schedule(1)).checkpoint is None


def test_folder_that_does_not_exist(tmp_path):
    run = read_run(tmp_path / 'none', Schedule(2))
    assert run.status == 'no such directory'


@pytest.mark.parametrize('train_cfg, schedule', [
    (dict(type='EpochBasedTrainLoop', max_epochs=12), Schedule(12)),
    (dict(by_epoch=True, max_epochs=3, val_interval=2),
     Schedule(3, 'epoch', 2)),
    (dict(type='IterBasedTrainLoop', max_iters=90000),
     Schedule(90000, 'iteration', 1000)),
])
def test_schedule_of_a_config(train_cfg, schedule):
    assert read_schedule(Config(dict(train_cfg=train_cfg))) == schedule


def test_config_without_training_is_refused():
    with pytest.raises(ValueError, match='train_cfg must have max_epochs.*{}'):
        read_schedule(Config(dict(train_cfg=None)))


def test_config_is_found_where_mmengine_writes_it(tmp_path):
    with pytest.raises(FileNotFoundError, match='work_dir must hold .*'
                       f'{tmp_path.name} without'):
        find_config(tmp_path)
    for name in ('20261201_1', '20261202_1'):
        write_log(tmp_path, name, [])
        (tmp_path / name / 'vis_data' / 'config.py').touch()
    latest = tmp_path / '20261202_1' / 'vis_data' / 'config.py'
    assert find_config(tmp_path) == latest
    (tmp_path / 'one.py').touch()
    assert find_config(tmp_path) == tmp_path / 'one.py'
    (tmp_path / 'two.py').touch()
    assert find_config(tmp_path) == latest


def test_config_of_no_folder_or_of_several_runs_is_refused(tmp_path):
    for name in ('one.py', 'two.py'):
        (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match='one.py, two.py'):
        find_config(tmp_path)
    with pytest.raises(FileNotFoundError,
                       match='work_dir must be a directory, got .*none'):
        find_config(tmp_path / 'none')
