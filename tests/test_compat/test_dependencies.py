import subprocess
import sys

import mmcv
import mmengine
import pytest

from acmix_det.compat.dependencies import DEPENDENCIES, Dependency, check_dependencies


def message_of(dependencies=DEPENDENCIES):
    with pytest.raises(ImportError) as caught:
        check_dependencies(dependencies)
    return caught.value.name, str(caught.value)


def test_installed_packages_pass():
    check_dependencies()


@pytest.mark.parametrize('name', [dependency.name for dependency in DEPENDENCIES])
def test_blocked_package_is_named_with_versions_and_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    blamed, message = message_of()
    dependency = next(dependency for dependency in DEPENDENCIES if dependency.name == name)
    assert blamed == name
    assert f'acmix_det needs {dependency.requirement}, ' in message
    assert 'pip install' in message.split('Get it with:')[1]


def test_package_that_is_not_installed_says_so():
    blamed, message = message_of((Dependency('no_such_package', '1.0'), ))
    assert blamed == 'no_such_package'
    assert message.startswith('acmix_det needs no_such_package>=1.0, which is not installed (')
    assert message.endswith("\n    pip install 'no_such_package>=1.0'")


@pytest.mark.parametrize('found', ['0.10.5', '0.9', '1.0.0', '1.0.0rc1', '2.1.0+cu118'])
def test_version_out_of_range_is_named(found, monkeypatch):
    monkeypatch.setattr(mmengine, '__version__', found)
    blamed, message = message_of()
    assert blamed == 'mmengine'
    assert f'needs mmengine>=0.10.7,<1.0.0, but found mmengine {found}. ' in message
    assert "pip install 'mmengine>=0.10.7,<1.0.0'" in message


@pytest.mark.parametrize('found', ['0.10.7', '0.10.10', '0.11', '0.10.8+local.1'])
def test_version_in_range_passes(found, monkeypatch):
    monkeypatch.setattr(mmengine, '__version__', found)
    check_dependencies()


def test_mmcv_message_names_the_lite_and_the_compiled_way(monkeypatch):
    monkeypatch.setattr(mmcv, '__version__', '2.2.0')
    blamed, message = message_of()
    assert blamed == 'mmcv'
    assert 'mmcv>=2.0.0,<2.2.0, but found mmcv 2.2.0' in message
    assert 'pip install mmcv-lite==2.1.0' in message and 'acmix_det[lite]' in message
    assert '--no-build-isolation' in message and 'mmcv==2.1.0' in message


def test_optimizer_registered_twice_in_mmengine_gives_the_cure(tmp_path, monkeypatch):
    # What mmengine < 0.10.6 does under torch >= 2.5.
    (tmp_path / 'mmengine_stub').mkdir()
    (tmp_path / 'mmengine_stub' / '__init__.py').write_text(
        "__version__ = '0.10.8'\n")
    (tmp_path / 'mmengine_stub' / 'runner.py').write_text(
        "raise KeyError('Adafactor is already registered in optimizer at torch.optim')\n")
    monkeypatch.syspath_prepend(tmp_path)
    mmengine_row = next(dependency for dependency in DEPENDENCIES if dependency.name == 'mmengine')
    assert mmengine_row.probe == 'mmengine.runner'
    stub = mmengine_row._replace(name='mmengine_stub', probe='mmengine_stub.runner',
                                 distributions=('mmengine', ))
    blamed, message = message_of((stub, ))
    assert blamed == 'mmengine_stub'
    assert 'needs mmengine_stub>=0.10.7,<1.0.0, found mmengine_stub 0.10' in message
    assert "KeyError: 'Adafactor is already registered" in message


def test_broken_binary_part_of_pycocotools_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pycocotools.mask', None)
    blamed, message = message_of()
    assert blamed == 'pycocotools'
    assert 'found pycocotools 2.' in message and 'but it does not import' in message
    assert '--force-reinstall' in message


IMPORTS = """
import sys
for optional in ('sklearn', 'triton', 'onnx', 'onnxruntime'):
    sys.modules[optional] = None
for required in ('torchvision', 'mmdet'):
    sys.modules[required] = None
    try:
        import acmix_det
    except ImportError as error:
        print(error.name, '|', str(error).splitlines()[0])
    del sys.modules[required]
import acmix_det
print('imported', acmix_det.__version__)
"""


def test_import_of_the_package_names_what_is_missing_and_needs_nothing_optional():
    run = subprocess.run([sys.executable, '-c', IMPORTS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith('torchvision | acmix_det needs torchvision>=0.21, ')
    assert lines[1].startswith('mmdet | acmix_det needs mmdet>=3.3.0,<3.4.0, ')
    assert lines[2].startswith('imported ')
