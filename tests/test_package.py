import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from acmix_det.compat.dependencies import DEPENDENCIES
from acmix_det.version import __version__

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(path.relative_to(ROOT).as_posix() for folder in ('configs', 'tools')
                 for path in (ROOT / folder).rglob('*')
                 if path.is_file() and '__pycache__' not in path.parts)


def requirements(name):
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines()
    return [line for line in lines if not line.startswith('#')]


def test_requirements_name_no_mmcv_outside_the_lite_extra():
    for path in (ROOT / 'requirements').glob('*.txt'):
        names = [re.match(r'[\w-]+', line).group() for line in requirements(path.stem)]
        assert ('mmcv-lite' in names) == (path.stem == 'lite'), path
        assert 'mmcv' not in names, path


def test_versions_checked_on_import_are_the_versions_pip_installs():
    checked = {dependency.requirement for dependency in DEPENDENCIES if dependency.name != 'mmcv'}
    installed = {line for line in requirements('runtime') if not line.startswith('setuptools')}
    assert checked == installed


def test_nothing_of_ours_imports_pkg_resources():
    pattern = re.compile(r'^\s*(import|from) pkg_resources', re.MULTILINE)
    paths = [ROOT / 'setup.py', *(path for folder in ('acmix_det', 'configs', 'tools')
                                  for path in (ROOT / folder).rglob('*.py'))]
    assert len(paths) > 10
    assert [path for path in paths if pattern.search(path.read_text(encoding='utf-8'))] == []


def test_every_metafile_of_the_model_index_exists():
    imports = yaml.safe_load((ROOT / 'model-index.yml').read_text())['Import']
    assert imports and [path for path in imports if not (ROOT / path).is_file()] == []


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    """A wheel and a source archive, built from a copy so that the checkout stays clean."""
    import shutil
    folder = tmp_path_factory.mktemp('build')
    source = folder / 'source'
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(
        '.git', '.venv', 'work_dirs', 'data', 'build', '__pycache__', '.mim', '*.egg-info'))
    code = ('from setuptools import build_meta\n'
            f'build_meta.build_sdist({str(folder)!r}); build_meta.build_wheel({str(folder)!r})\n')
    done = subprocess.run([sys.executable, '-c', code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    wheel, = folder.glob('*.whl')
    sdist, = folder.glob('*.tar.gz')
    return wheel, sdist


def test_wheel_carries_configs_tools_and_model_index(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    assert SOURCES and {f'acmix_det/.mim/{name}' for name in [*SOURCES, 'model-index.yml']} <= names
    assert 'acmix_det/compat/mmcv_ext.py' in names
    assert f'acmix_det-{__version__}.dist-info/METADATA' in names
    assert {name.split('/')[0] for name in names} == {'acmix_det', f'acmix_det-{__version__}.dist-info'}


def test_source_archive_carries_everything_a_build_needs(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition('/')[2] for name in sdist.getnames()}
    wanted = {*SOURCES, 'model-index.yml', 'setup.py', 'pyproject.toml', 'LICENSE', 'README.md',
              'requirements/runtime.txt', 'acmix_det/compat/mmcv_ext.py', 'tests/test_package.py'}
    assert wanted - names == set()
    assert not any('.mim' in name for name in names)


LOAD = """
import sys
import acmix_det
from mmengine.config import Config
assert acmix_det.__file__.startswith(sys.argv[1]), acmix_det.__file__
for number, name in enumerate(sys.argv[2:]):
    child = f'{sys.argv[1]}/child_{number}.py'
    open(child, 'w').write(f"_base_ = 'acmix_det::{name}'")
    assert Config.fromfile(child).filename == child
    print(name)
"""


def test_config_inherits_from_an_installed_acmix_det_by_name(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    names = [name.partition('/')[2] for name in SOURCES
             if name.startswith('configs/') and name.endswith('.py')]
    done = subprocess.run([sys.executable, '-c', LOAD, str(tmp_path), *names], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert names and [line for line in done.stdout.splitlines() if line in names] == names
