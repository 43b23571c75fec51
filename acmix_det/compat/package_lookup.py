"""Let mmengine find packages by name in every kind of installation.

A config may inherit from `'mmdet::...'` or `'acmix_det::...'`. mmengine 0.10.7 resolves these names
with pkg_resources, which setuptools 82 removed and which does not find packages installed with
`pip install -e`, and it accepts only packages on a fixed list.
"""
import importlib.util
from importlib import metadata
from pathlib import Path

import mmengine.config.config
import mmengine.config.utils
import mmengine.hub.hub
import mmengine.utils
import mmengine.utils.package_utils

_USERS = (mmengine.utils.package_utils, mmengine.utils, mmengine.config.config, mmengine.hub.hub)


def is_installed(package):
    """Say whether a package is installed or importable, as `mmengine.utils.is_installed` does."""
    try:
        metadata.distribution(package)
        return True
    except metadata.PackageNotFoundError:
        spec = importlib.util.find_spec(package)
        return spec is not None and spec.origin is not None


def get_installed_path(package):
    """Return the folder of a package, as `mmengine.utils.get_installed_path` does.

    Args:
        package (str): Name of the module, or of the distribution that holds it.

    Raises:
        PackageNotFoundError: There is neither a module nor a distribution of that name.
        RuntimeError: It is a namespace package, which has no folder of its own.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:  # mmsegmentation holds the module mmseg
        modules = (metadata.distribution(package).read_text('top_level.txt') or '').split()
        public = [module for module in modules if not module.startswith('_')]
        spec = importlib.util.find_spec(public[0]) if public else None
    if spec is None or not spec.origin:
        raise RuntimeError(f'package must be a regular package, got {package!r}')
    return str(Path(spec.origin).parent)


def register_config_package():
    """Put acmix_det on mmengine's list and the two functions above in the place of mmengine's."""
    mmengine.config.utils.MODULE2PACKAGE['acmix_det'] = 'acmix_det'
    for function in (is_installed, get_installed_path):
        for module in _USERS:
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)
