_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# ImageNet weights for the stem, the 1x1 convolutions and the norms. Attention
# starts random: no frozen stage, norms that train. The weights need batch
# norm; SyncBN has the same keys and takes its statistics over all GPUs.
model = dict(
    backbone=dict(
        type='ACmixResNet',
        frozen_stages=-1,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        norm_eval=False),
    neck=dict(type='ACmixFPN'))
optim_wrapper = dict(clip_grad=dict(max_norm=10, norm_type=2))
