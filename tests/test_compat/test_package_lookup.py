import importlib
import sys
from importlib import metadata
from pathlib import Path

import mmengine.utils
import mmdet
import pytest
from mmengine.config import Config

import acmix_det
from acmix_det.compat.package_lookup import get_installed_path, is_installed


@pytest.fixture
def without_pkg_resources(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pkg_resources', None)


def test_config_inherits_from_mmdet_without_pkg_resources(tmp_path, without_pkg_resources):
    (tmp_path / 'a.py').write_text("_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'\n")
    assert Config.fromfile(tmp_path / 'a.py').model.type == 'RetinaNet'


def test_host_uses_the_lookup_everywhere(without_pkg_resources):
    for name in ('mmengine.utils', 'mmengine.config.config', 'mmengine.hub.hub'):
        module = importlib.import_module(name)
        assert module.get_installed_path('mmdet') == str(Path(mmdet.__file__).parent)
    assert mmengine.utils.is_installed('mmdet') is True


def test_own_package_is_found_in_an_editable_install_too():
    assert get_installed_path('acmix_det') == str(Path(acmix_det.__file__).parent)


@pytest.mark.parametrize('name, expected', [('mmdet', True), ('opencv-python', True), ('json', True),
                                            ('no_such_package', False)])
def test_is_installed_knows_distributions_and_modules(name, expected):
    assert is_installed(name) is expected


def test_distribution_name_that_is_not_the_module_name_is_resolved():
    import yaml
    assert get_installed_path('PyYAML') == str(Path(yaml.__file__).parent)


def test_unknown_package_is_named():
    with pytest.raises(metadata.PackageNotFoundError, match='no_such_package'):
        get_installed_path('no_such_package')


def test_namespace_package_is_named(tmp_path, monkeypatch):
    (tmp_path / 'only_a_folder').mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="package must be a regular package, got 'only_a_folder'"):
        get_installed_path('only_a_folder')
