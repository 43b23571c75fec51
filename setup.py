import platform
import re
import shutil
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
# mmengine and mim look for these in <package>/.mim.
MIM_FILES = ('configs', 'tools', 'model-index.yml')


def read_version():
    text = (ROOT / 'acmix_det' / 'version.py').read_text(encoding='utf-8')
    return re.search(r"^__version__ = '(.+)'$", text, re.MULTILINE).group(1)


def read_requirements(name):
    lines = (ROOT / 'requirements' / f'{name}.txt').read_text(encoding='utf-8').splitlines()
    return [line for line in lines if line and not line.startswith('#')]


class BuildPyWithMim(build_py):
    """Copy configs, tools and model index into the wheel; link to them in an editable install."""

    def run(self):
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        mim = package / 'acmix_det' / '.mim'
        mim.mkdir(parents=True, exist_ok=True)
        for name in MIM_FILES:
            target = mim / name
            remove(target)
            if self.editable_mode:
                link_or_copy(ROOT / name, target)
            else:
                copy(ROOT / name, target)


KERNELS = 'acmix_det/ops/csrc/'
COMMON_FLAGS = ['-O3', '-g0', '-fvisibility=hidden', '-std=c++17', '-fno-math-errno', '-fno-trapping-math']
# One set of kernels for every instruction set; the library chooses when it runs. Baseline first: of the
# standard library's templates, which all sets share, the linker keeps the first copy.
ISA_FLAGS = {'kernels_baseline.cpp': []}
if platform.machine().lower() in ('x86_64', 'amd64'):
    ISA_FLAGS.update({
        'kernels_avx2.cpp': ['-mavx2', '-mfma'],
        'kernels_avx512.cpp': ['-mavx512f', '-mavx512bw', '-mavx512dq', '-mavx512vl', '-mfma'],
    })


class BuildKernels(build_ext):
    """Compile each source for its instruction set. Without a compiler the package does without."""

    def build_extension(self, ext):
        objects = []
        for source in ext.sources:
            flags = ISA_FLAGS.get(Path(source).name, [])
            objects += self.compiler.compile([source], output_dir=self.build_temp, depends=ext.depends,
                                             extra_postargs=[*ext.extra_compile_args, *flags])
        self.compiler.link_shared_object(objects, self.get_ext_fullpath(ext.name), target_lang='c++',
                                         extra_postargs=['-pthread'], build_temp=self.build_temp)


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(source, target):
    try:
        target.symlink_to(Path('..', '..', source.name), target_is_directory=source.is_dir())
    except OSError:  # Windows without the right to make links
        copy(source, target)


def copy(source, target):
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns('__pycache__', '*.py[cod]'))
    else:
        shutil.copy2(source, target)


EXTRAS = {name: read_requirements(name) for name in ('lite', 'digits', 'pretrain', 'test')}

setup(
    name='acmix_det',
    version=read_version(),
    description='SASA and ACmix self-attention layers in the place of convolutions in MMDetection',
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    keywords='computer vision, object detection, self-attention, mmdetection',
    license='Apache-2.0',
    classifiers=[
        'Development Status :: 4 - Beta',
        'Operating System :: OS Independent',
        'Programming Language :: Python :: 3',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    packages=find_packages(include=['acmix_det', 'acmix_det.*']),
    # mmcv 2.1 and mmengine 0.10 call pkgutil.find_loader, which Python 3.14 removed.
    python_requires='>=3.10,<3.14',
    install_requires=read_requirements('runtime'),
    # 'all' leaves out 'lite', which would overwrite compiled mmcv ops.
    extras_require={**EXTRAS, 'all': EXTRAS['digits'] + EXTRAS['test']},
    # A failure to build it is a warning: the portable backend gives the same results.
    ext_modules=[
        Extension('acmix_det.ops._local_attention',
                  sources=[KERNELS + name for name in ('dispatch.cpp', *ISA_FLAGS)],
                  depends=sorted(map(str, Path(KERNELS).glob('*.[hi]*'))),
                  extra_compile_args=COMMON_FLAGS, language='c++', optional=True)
    ],
    cmdclass={'build_py': BuildPyWithMim, 'build_ext': BuildKernels},
    zip_safe=False,
)
