"""tools/check_dataset.py."""
import json
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
CONFIG = """
default_scope = 'mmdet'
data = dict(type='CocoDataset', data_root='data', ann_file='set.json',
            data_prefix=dict(img='images/'), metainfo=dict(classes=['cat']))
model = dict(bbox_head=dict(num_classes=1))
train_dataloader = dict(dataset=data)
val_dataloader = dict(dataset=data)
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def start(*args):
        monkeypatch.setattr(sys, 'argv', ['check_dataset.py', *args])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(ROOT / 'tools' / 'check_dataset.py'),
                           run_name='__main__')
        return caught.value.code, capsys.readouterr()

    return start


@pytest.fixture
def write(tmp_path):
    (tmp_path / 'data' / 'images').mkdir(parents=True)
    Image.new('RGB', (40, 30)).save(tmp_path / 'data' / 'images' / '0.png')

    def put(width=40, config=CONFIG, boxes=4):
        annotations = [dict(id=i, image_id=0, category_id=1, area=9,
                            bbox=[1, 1, width - 40 or 9, 9])
                       for i in range(boxes)]
        (tmp_path / 'data' / 'set.json').write_text(json.dumps(dict(
            images=[dict(id=0, file_name='0.png', width=width, height=30)],
            annotations=annotations, categories=[dict(id=1, name='cat')])))
        (tmp_path / 'config.py').write_text(config)

    put()
    return put


def test_sound_set_ends_with_status_zero(run, write):
    code, out = run('config.py')
    assert code == 0
    assert 'train, val: data/set.json: 1 images, 4 annotations, 1 categories' \
        '\n  nothing found\n\nno errors' in out.out
    assert 'headers: 100%' in out.err


def test_infos_alone_are_no_error(run, write):
    write(boxes=0)
    code, out = run('config.py', '--split', 'val')
    assert code == 0 and 'no errors' in out.out
    assert '\nval: data/set.json' in out.out
    assert '  info  1  image without annotations' in out.out


def test_errors_are_counted_shown_and_written(run, write):
    write(width=30)
    code, out = run('--ann-file', 'data/set.json', '--img-root',
                    'data/images', '--json', 'report.json')
    assert code == 1
    assert '\n  error  4  box of negative width or height\n' in out.out
    lines = [line.strip() for line in out.out.splitlines()]
    shown = [x for x in lines if x.startswith('annotation ')]
    assert shown == [f'annotation {i}: bbox [1, 1, -10, 9]' for i in range(3)]
    assert lines[lines.index(shown[-1]) + 1] == '...'
    assert lines[-1] == '5 errors'
    report = json.loads(Path('report.json').read_text())
    assert report['num_errors'] == 5 and report['classes'] is None
    file, = report['files']
    assert file['ann_file'] == 'data/set.json' and file['images'] == 1
    assert {f['kind']: f['count'] for f in file['findings']} == {
        'box of negative width or height': 4,
        'image of another size than in the file': 1
    }


def test_images_can_be_left_alone(run, write):
    (Path('data') / 'images' / '0.png').unlink()
    assert run('config.py', '--no-images')[0] == 0
    assert run('--ann-file', 'data/set.json', '--no-images')[0] == 0
    assert run('--ann-file', 'data/set.json', '--img-root', 'data/images',
               '--no-images')[0] == 0
    code, out = run('config.py')
    assert code == 1 and 'missing image file' in out.out


@pytest.mark.parametrize('args', [
    ('config.py', ), ('--ann-file', 'data/set.json', '--img-root',
                      'data/images')], ids=['config', 'file'])
def test_cut_image_is_found_with_decode(args, run, write):
    path = Path('data') / 'images' / '0.png'
    path.write_bytes(path.read_bytes()[:60])
    assert run(*args)[0] == 0
    code, out = run(*args, '--decode')
    assert code == 1
    assert f'image file that cannot be decoded\n            {path}' in out.out
    assert 'images: 100%' in out.err


@pytest.mark.parametrize('change, message', [
    (("['cat']", "('cat')"), "got the string 'cat'"),
    (('num_classes=1', 'num_classes=3'), 'bbox_head.num_classes=3'),
    (("['cat']", "['dog']"), "'dog', the file has ['cat']")],
    ids=['string', 'number', 'name'])
def test_classes_of_the_config_are_checked(change, message, run, write):
    write(config=CONFIG.replace(*change))
    code, out = run('config.py', '--json', 'report.json')
    assert code == 1 and message in out.out
    assert message in json.dumps(json.loads(
        Path('report.json').read_text())).replace('\\', '')


@pytest.mark.parametrize('args, message', [
    ((), 'give a config or --ann-file'),
    (('config.py', '--ann-file', 'data/set.json'), 'one of them'),
    (('no.py', ), 'config must be a file, got no.py'),
    (('config.py', '--img-root', 'data'), '--img-root must be given with'),
    (('--ann-file', 'data/set.json'), '--img-root must be given with'),
    (('--ann-file', 'data/set.json', '--img-root', 'no'),
     '--img-root must be a folder, got no'),
    (('config.py', '--decode', '--no-images'), '--decode must not be given'),
    (('config.py', '--split', 'test'), 'one of test, got none'),
    (('config.py', '--split', 'other'), "invalid choice: 'other'"),
])
def test_bad_arguments_end_with_a_message(args, message, run, write):
    code, out = run(*args)
    assert message in (out.err if code == 2 else code)


def test_missing_annotation_file_is_an_error_of_the_report(run, write):
    code, out = run('--ann-file', 'no.json', '--no-images')
    assert code == 1
    assert 'no.json: not read' in out.out
    assert 'No such file or directory' in out.out
