"""One clear ImportError for a dependency that is missing, broken or of the wrong version."""
import importlib
import re
from importlib import metadata
from typing import NamedTuple, Optional

LITE_MMCV = 'pip install mmcv-lite==2.1.0'
COMPILED_MMCV = ("pip install 'setuptools<81' wheel ninja psutil && "
                 'MMCV_WITH_OPS=1 pip install --no-build-isolation --no-binary mmcv mmcv==2.1.0')
BOTH_MMCV = f"""{LITE_MMCV}
        (no compiler needed, what the extra acmix_det[lite] installs: RetinaNet, Faster and Mask R-CNN)
    or, for every op of mmcv, build it against the installed torch (about half an hour):
    pip uninstall mmcv-lite
    {COMPILED_MMCV}"""


class Dependency(NamedTuple):
    """A package, the versions that work, and how to get them.

    Args:
        name (str): Name of the top-level module.
        minimum (str): First version that works.
        below (str, optional): First version that does not work any more. Defaults to None.
        probe (str, optional): Submodule whose import shows that the package works. Defaults to None.
        distributions (tuple[str]): Names in the package index, if not `name`. Defaults to ().
        command (str, optional): Command that installs it. Defaults to pip with the versions that work.
    """
    name: str
    minimum: str
    below: Optional[str] = None
    probe: Optional[str] = None
    distributions: tuple = ()
    command: Optional[str] = None

    @property
    def requirement(self):
        return f'{self.name}>={self.minimum}' + (f',<{self.below}' if self.below else '')


# torch and torchvision go together: a torchvision built for another torch fails at import.
_TORCH = "pip install --upgrade 'torch>=2.6' 'torchvision>=0.21'"

DEPENDENCIES = (
    Dependency('numpy', '1.26'),
    # 2.6: torch.load is weights-only by default and takes an allow-list.
    Dependency('torch', '2.6', command=_TORCH),
    Dependency('torchvision', '0.21', probe='torchvision.ops', command=_TORCH),
    # The compiled module is the part that breaks when numpy changes its binary interface.
    Dependency('pycocotools', '2.0.7', probe='pycocotools.mask',
               command="pip install --upgrade --force-reinstall --no-deps 'pycocotools>=2.0.7'"),
    # Before 0.10.6 importing mmengine.optim registers Adafactor twice under torch 2.5 and newer.
    Dependency('mmengine', '0.10.7', '1.0.0', probe='mmengine.runner'),
    Dependency('mmcv', '2.0.0', '2.2.0', distributions=('mmcv', 'mmcv-lite', 'mmcv-full'),
               command=BOTH_MMCV),
    Dependency('mmdet', '3.3.0', '3.4.0'),
)


def check_dependencies(dependencies=DEPENDENCIES):
    """Import every dependency and compare its version.

    Args:
        dependencies (tuple[Dependency]): What to check, in this order. Defaults to all.

    Raises:
        ImportError: The first dependency that does not fit: its name, the version found, the versions
            that work and the command that installs them.
    """
    for dependency in dependencies:
        module = _import(dependency, dependency.name)
        found = _found_version(dependency, module)
        if found is None or not _fits(found, dependency):
            raise _error(dependency, f'but found {dependency.name} {found}')
        if dependency.probe:
            _import(dependency, dependency.probe)


def _import(dependency, name):
    try:
        return importlib.import_module(name)
    except Exception as error:  # a broken binary raises anything: RuntimeError, ValueError, KeyError
        found = _found_version(dependency)
        state = (f'found {dependency.name} {found}, but it does not import' if found
                 else 'which is not installed')
        raise _error(dependency, f'{state} ({type(error).__name__}: {error})') from error


def _found_version(dependency, module=None):
    version = getattr(module, '__version__', None)
    for distribution in () if version else (dependency.distributions or (dependency.name, )):
        try:
            version = metadata.version(distribution)
            break
        except metadata.PackageNotFoundError:
            continue
    return version


def _fits(version, dependency):
    found = _release(version)
    return (_release(dependency.minimum) <= found
            and (dependency.below is None or found < _release(dependency.below)))


def _release(version):
    """The numbers of a version, `'2.6.0+cu124'` -> `(2, 6, 0)`."""
    numbers = [int(number) for number in re.match(r'[\d.]*', version).group().split('.') if number]
    return tuple((numbers + [0, 0, 0])[:3])


def _error(dependency, problem):
    command = dependency.command or f"pip install '{dependency.requirement}'"
    return ImportError(
        f'acmix_det needs {dependency.requirement}, {problem}. Get it with:\n    {command}',
        name=dependency.name)
