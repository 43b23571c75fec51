_base_ = 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# From scratch: no frozen stage, norms that train, and a norm that bears two
# images per GPU.
norm_cfg = dict(type='GN', num_groups=32, requires_grad=True)
model = dict(
    backbone=dict(
        type='ACmixResNet',
        frozen_stages=-1,
        norm_cfg=norm_cfg,
        norm_eval=False,
        init_cfg=None),
    neck=dict(type='ACmixFPN'))
optim_wrapper = dict(clip_grad=dict(max_norm=10, norm_type=2))
