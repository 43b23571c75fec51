"""ResNets whose 3x3 convolutions are attention."""
import warnings
from typing import Dict, Optional, Sequence

from mmdet.models.backbones.resnet import BasicBlock, Bottleneck, ResNet
from mmdet.registry import MODELS
from mmengine.logging import print_log
from torch import Tensor, nn

from acmix_det.checkpoints import some_of
from acmix_det.layers.base import AttentionConv2d
from acmix_det.layers.conv_fit import expected_relu
from acmix_det.ops.checks import check_int, check_list, check_size
from .pretrained import check_init_cfg, count, load_fitting, read_weights
from .swap import resolve_attn_cfg, swap_conv

# the 3x3 convolutions of a block
_SPATIAL_CONVS = {BasicBlock: ('conv1', 'conv2'), Bottleneck: ('conv2', )}


class AttnResNet(ResNet):
    """mmdet's ResNet with attention for the 3x3 convolutions of its blocks.

    Every argument of :class:`mmdet.models.ResNet` is accepted, and the depths
    26 ([1, 2, 4, 1] bottlenecks) and 38 ([2, 3, 5, 2]) of the SASA and ACmix
    papers besides mmdet's own.

    Args:
        depth (int): 18, 26, 34, 38, 50, 101 or 152.
        attn_cfg (dict | None): The attention layer: ``type`` and its own
            arguments (``num_heads``, ``attn_kernel_size``, ...). Defaults to
            None, the layer's defaults.
        stage_with_attn (Sequence[bool] | None): Which stages are attention,
            as long as ``num_stages``. Defaults to None, all of them.
        attn_stem (dict | None): Arguments of
            :class:`acmix_det.layers.SASAStem2d` (an empty dict for its
            defaults), which replaces the convolution of the stem; a batch
            norm and max pooling follow. Defaults to None, mmdet's stem.
        **kwargs: Arguments of :class:`mmdet.models.ResNet`. ``pretrained`` is
            refused, use ``init_cfg``; its type may be 'WarmStart' too, see
            :meth:`init_weights`.

    Raises:
        TypeError: If ``attn_cfg`` has a key that its layer does not take, or
            an argument has the wrong type.
        ValueError: If the depth does not exist, nothing would be replaced, or
            arguments contradict each other.

    Example:
        >>> import torch
        >>> from acmix_det.models import SASAResNet
        >>> model = SASAResNet(26, stage_with_attn=(False, False, True, True))
        >>> [tuple(x.shape) for x in model(torch.rand(1, 3, 64, 96))]
        [(1, 256, 16, 24), (1, 512, 8, 12), (1, 1024, 4, 6), (1, 2048, 2, 3)]
    """

    arch_settings = {
        **ResNet.arch_settings,
        26: (Bottleneck, (1, 2, 4, 1)),
        38: (Bottleneck, (2, 3, 5, 2)),
    }
    attn_type: str

    def __init__(self,
                 depth: int,
                 *,
                 attn_cfg: Optional[dict] = None,
                 stage_with_attn: Optional[Sequence[bool]] = None,
                 attn_stem: Optional[dict] = None,
                 **kwargs) -> None:
        if depth not in [*self.arch_settings]:  # of any type
            raise ValueError(f'depth must be one of '
                             f'{sorted(self.arch_settings)}, got {depth!r}')
        if kwargs.get('pretrained') is not None:
            raise ValueError(
                'pretrained must be None, use init_cfg=dict(type="Pretrained",'
                f' checkpoint=...) instead, got {kwargs["pretrained"]!r}')
        check_init_cfg(kwargs.get('init_cfg'))
        num_stages = check_size('num_stages', kwargs.get('num_stages', 4),
                                most=4)
        if stage_with_attn is None:
            stage_with_attn = (True, ) * num_stages
        if not isinstance(stage_with_attn, Sequence) or not all(
                isinstance(x, bool) for x in stage_with_attn):
            raise TypeError('stage_with_attn must be a list or tuple of bool, '
                            f'got {stage_with_attn!r}')
        if len(stage_with_attn) != num_stages:
            raise ValueError(
                'stage_with_attn must have one entry for each of the '
                f'num_stages={num_stages}, got {tuple(stage_with_attn)}')
        if not any(stage_with_attn) and attn_stem is None:
            raise ValueError('stage_with_attn must be True for some stage '
                             f'(or use ResNet), got {tuple(stage_with_attn)}')
        frozen = check_int('frozen_stages', kwargs.get('frozen_stages', -1))
        if frozen > num_stages:
            raise ValueError(f'frozen_stages must be at most num_stages='
                             f'{num_stages}, got {frozen}')
        out_indices = check_list(
            'out_indices', kwargs.get('out_indices', range(num_stages)))
        increasing = sorted({check_int('each of out_indices', i)
                             for i in out_indices})
        if (not out_indices or list(out_indices) != increasing
                or not 0 <= out_indices[0] <= out_indices[-1] < num_stages):
            raise ValueError(
                'out_indices must be increasing stages from 0 to '
                f'{num_stages - 1}, got {kwargs["out_indices"]}')
        kwargs['out_indices'] = out_indices
        if attn_stem is not None and not isinstance(attn_stem, dict):
            raise TypeError(f'attn_stem must be a dict or None, got '
                            f'{attn_stem!r}')
        if attn_stem is not None and kwargs.get('deep_stem'):
            raise ValueError('attn_stem must be None with deep_stem=True, got '
                             f'{attn_stem}')
        if kwargs.get('dcn') is not None:
            with_dcn = kwargs.get('stage_with_dcn', (False, ) * num_stages)
            if any(a and d for a, d in zip(stage_with_attn, with_dcn)):
                raise ValueError(
                    'stage_with_dcn and stage_with_attn must not name the '
                    f'same stage, got stage_with_dcn={tuple(with_dcn)}, '
                    f'stage_with_attn={tuple(stage_with_attn)}')
        attn_cfg = resolve_attn_cfg(attn_cfg, self.attn_type)
        try:
            super().__init__(depth=depth, **kwargs)
        except AssertionError as error:  # mmdet's have no text
            raise ValueError(
                'num_stages must be from 1 to 4, and strides, dilations and '
                f'plugins fit it (see mmdet\'s ResNet), got {kwargs}'
            ) from error
        self.attn_cfg = attn_cfg
        self.stage_with_attn = tuple(stage_with_attn)
        for layer_name, with_attn in zip(self.res_layers,
                                         self.stage_with_attn):
            if with_attn:
                for block in getattr(self, layer_name):
                    for name in _SPATIAL_CONVS[self.block]:
                        swap_conv(block, name, attn_cfg)
        if attn_stem is not None:
            self._make_attn_stem(attn_stem)
        self._freeze_stages()  # the new layers too
        self._warn_of_frozen_attention(attn_stem is not None)

    def _make_attn_stem(self, attn_stem: dict) -> None:
        cfg = dict(
            type='SASAStem',
            in_channels=self.conv1.in_channels,
            out_channels=self.conv1.out_channels)
        try:
            self.conv1 = MODELS.build({**cfg, **attn_stem})
        except TypeError as error:
            raise TypeError('attn_stem must hold arguments of SASAStem, got '
                            f'{attn_stem}: {error}') from error
        self.relu = nn.Identity()  # none in the paper's stem
        size = self.conv1.block_size
        self.maxpool = nn.MaxPool2d(size, size, ceil_mode=True)

    def _warn_of_frozen_attention(self, stem: bool) -> None:
        frozen = ['stem'] if stem and self.frozen_stages >= 0 else []
        frozen += [
            name for i, name in enumerate(self.res_layers)
            if self.stage_with_attn[i] and i < self.frozen_stages
        ]
        if frozen:
            warnings.warn(
                f'frozen_stages={self.frozen_stages} freezes the attention of '
                f'{", ".join(frozen)} in {type(self).__name__}; unless a '
                'checkpoint that holds these layers is loaded, they stay '
                'random for the whole training: set frozen_stages=-1 or '
                'stage_with_attn=False for them')

    def train(self, mode: bool = True) -> 'AttnResNet':
        """Set the mode, frozen stages and ``norm_eval`` respected."""
        super().train(mode)
        return self  # mmdet's returns None

    def init_weights(self) -> None:
        """Initialise or load the weights.

        With ``init_cfg=dict(type='Pretrained', ...)`` the weights that fit are
        loaded (a convolutional ResNet's too: all but its attention layers);
        with ``type='WarmStart'`` attention layers are then set to imitate the
        convolutions of the checkpoint as well as they can. A summary is
        logged.

        Raises:
            ValueError: If no weight of the checkpoint fits, or it has no
                convolution to imitate.
        """
        cfg = self.init_cfg
        kind = cfg.get('type', 'Pretrained') if isinstance(cfg, dict) else None
        if kind in ('Pretrained', 'WarmStart'):
            state = read_weights(cfg)
            summary = load_fitting(self, state, cfg['checkpoint'])
            if kind == 'WarmStart':
                summary += '; ' + self._imitate_convs(state)
            print_log(summary, logger='current')
            self._is_init = True
        else:
            super().init_weights()

    def _imitate_convs(self, state: Dict[str, Tensor]) -> str:
        """Fit attention layers to convolutions; return a summary."""
        errors, random = {}, []
        for stage in self.res_layers:
            for number, block in enumerate(getattr(self, stage)):
                for name in _SPATIAL_CONVS[self.block]:
                    layer = getattr(block, name)
                    if not isinstance(layer, AttentionConv2d):
                        continue
                    path = f'{stage}.{number}.{name}'
                    weight = state.get(f'{path}.weight')
                    shape = (layer.out_channels, layer.in_channels,
                             *layer.kernel_size)
                    error = None
                    if weight is not None and weight.shape == shape:
                        # conv2 sees norm1 and a ReLU
                        mean = _mean_behind(
                            block.norm1) if name == 'conv2' else None
                        error = layer.imitate_conv(weight, mean)
                    if error is None:
                        random.append(path)
                    else:
                        errors[path] = error
        if not errors:
            raise ValueError(
                'init_cfg must name a checkpoint with convolutions for the '
                f'attention layers to imitate, got none for {some_of(random)}')
        mean = sum(errors.values()) / len(errors)
        lines = [f'\n  {path}: {error:.2f}' for path, error in errors.items()]
        return (f'{len(errors)} attention layers imitate convolutions, mean '
                f'relative error {mean:.2f}; random: '
                f'{count(random)}' + ''.join(lines))


def _mean_behind(norm: nn.Module) -> Optional[Tensor]:
    """Expected output of each channel of a norm and a ReLU."""
    if getattr(norm, 'weight', None) is None or norm.bias is None:
        return None
    return expected_relu(norm.bias.detach(), norm.weight.detach().abs())


@MODELS.register_module()
class SASAResNet(AttnResNet):
    __doc__ = AttnResNet.__doc__
    attn_type = 'SASA'


@MODELS.register_module()
class ACmixResNet(AttnResNet):
    __doc__ = AttnResNet.__doc__
    attn_type = 'ACmix'
