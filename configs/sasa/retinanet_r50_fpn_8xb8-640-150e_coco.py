_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    './_base_/coco_640_8xb8-150e.py', 'mmdet::_base_/default_runtime.py'
]
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# From scratch: no weights of the attention backbones are published. P6 from P5
# and 6 anchors follow from the parameter counts of the paper; 2 scales x 3
# ratios are chosen here.
model = dict(
    backbone=dict(
        frozen_stages=-1,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        norm_eval=False,
        init_cfg=None),
    neck=dict(add_extra_convs='on_output', relu_before_extra_convs=True),
    bbox_head=dict(anchor_generator=dict(scales_per_octave=2)))
default_hooks = dict(checkpoint=dict(interval=10, max_keep_ckpts=3))
