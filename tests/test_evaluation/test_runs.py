import json

import pytest

from acmix_det.evaluation import read_run


def write_log(work_dir, name, lines):
    folder = work_dir / name / 'vis_data'
    folder.mkdir(parents=True)
    (folder / 'scalars.json').write_text(
        '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in lines))


def train_line(step, time, epoch=1):
    return dict(loss=1., time=time, step=step, iter=step, epoch=epoch)


def val_line(epoch, value):
    return {'coco/bbox_mAP': value, 'step': epoch, 'time': 9., 'data_time': 9.}


def save(work_dir, epoch):
    path = work_dir / f'epoch_{epoch}.pth'
    path.touch()
    (work_dir / 'last_checkpoint').write_text(f'/moved/from/here/{path.name}')
    return path


def test_finished_run(tmp_path):
    write_log(tmp_path, '1', [
        train_line(10, 0.5), train_line(15, 1.0), val_line(1, 0.2),
        train_line(25, 0.1, 2), val_line(2, 0.4)
    ])
    path = save(tmp_path, 2)
    run = read_run(tmp_path, 2)
    assert run.finished and run.status == 'finished'
    assert run.checkpoint == path and run.epochs == 2
    assert run.seconds == pytest.approx(10 * 0.5 + 5 * 1.0 + 10 * 0.1)
    assert run.final('coco/bbox_mAP') == 0.4
    assert run.curve('coco/bbox_mAP') == ([1, 2], [0.2, 0.4])


def test_repeated_iterations_of_a_resumed_run_count_once(tmp_path):
    write_log(tmp_path, '20261201_1', [
        train_line(10, 0.5), val_line(1, 0.2), train_line(20, 7.),
        '{"loss": 1.0, "time": 0.5, "st'
    ])
    write_log(tmp_path, '20261201_2', [train_line(20, 0.3), val_line(2, 0.3)])
    save(tmp_path, 2)
    run = read_run(tmp_path, 2)
    assert run.finished
    assert run.seconds == pytest.approx(10 * 0.5 + 10 * 0.3)


@pytest.mark.parametrize('saved, evaluated, status', [
    (None, 0, 'not started'), (1, 1, r'unfinished (1 of 2 epochs)'),
    (2, 1, 'unfinished (2 of 2 epochs)'), (1, 2, 'unfinished (1 of 2 epochs)')
])
def test_unfinished_runs_have_no_final_metric(tmp_path, saved, evaluated,
                                              status):
    write_log(tmp_path, '1', [val_line(e + 1, 0.1) for e in range(evaluated)])
    if saved:
        save(tmp_path, saved)
    run = read_run(tmp_path, 2)
    assert not run.finished and run.status == status
    assert run.final('coco/bbox_mAP') is None


def test_checkpoint_that_is_gone_does_not_count(tmp_path):
    save(tmp_path, 2).unlink()
    run = read_run(tmp_path, 2)
    assert run.checkpoint is None and run.status == 'not started'


def test_evaluation_without_detections_is_an_evaluation(tmp_path):
    write_log(tmp_path, '1', [dict(step=1, time=1., data_time=1.)])
    save(tmp_path, 1)
    run = read_run(tmp_path, 1)
    assert run.finished and run.final('coco/bbox_mAP') is None


def test_minus_one_of_coco_is_no_value(tmp_path):
    write_log(tmp_path, '1', [val_line(1, -1)])
    save(tmp_path, 1)
    assert read_run(tmp_path, 1).final('coco/bbox_mAP') is None


def test_folder_that_does_not_exist(tmp_path):
    assert read_run(tmp_path / 'none', 2).status == 'not started'
