_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py'
]
custom_imports = dict(
    imports=['acmix_det', 'acmix_det.compat.mmpretrain_neck'],
    allow_failed_imports=False)

# No code of the paper's PVTs is released. As PVT: AdamW, 300 epochs, cosine,
# weight decay 0.05, drop path 0.1. Chosen here: mmpretrain's augmentation and
# warm-up for Swin, and the mean over the last map, with no class token.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmdet.ACmixPyramidVisionTransformer',
        num_layers=[2, 2, 2, 2],
        drop_path_rate=0.1,
        out_indices=(3, )),
    neck=dict(type='LastMapMean'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        in_channels=512,
        loss=dict(
            type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        cal_acc=False),
    train_cfg=dict(augments=[
        dict(type='Mixup', alpha=0.8),
        dict(type='CutMix', alpha=1.0)
    ]))
train_dataloader = dict(batch_size=128)
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
