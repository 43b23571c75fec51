_base_ = 'mmdet::cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# Backbone, optimizer and warm-up of mmdet's Mask R-CNN with Swin-T, which has
# no Cascade Mask R-CNN.
# Starts as the ImageNet Swin-T, its attention as it was and the
# convolution path at zero weight. No address of released Swin-ACmix weights is
# known here; if you have them, convert them by tools/convert_checkpoint.py and
# set init_cfg=dict(type='Pretrained', checkpoint=...).
pretrained = 'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/swin_tiny_patch4_window7_224.pth'  # noqa
model = dict(
    backbone=dict(
        _delete_=True,
        type='ACmixSwinTransformer',
        drop_path_rate=0.2,
        init_cfg=dict(type='WarmStart', checkpoint=pretrained)),
    neck=dict(in_channels=[96, 192, 384, 768]))

param_scheduler = [
    dict(
        type='LinearLR', start_factor=0.001, by_epoch=False, begin=0,
        end=1000),
    dict(
        type='MultiStepLR',
        begin=0,
        end=12,
        by_epoch=True,
        milestones=[8, 11],
        gamma=0.1)
]
optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            'attn.alpha': dict(decay_mult=0.),
            'attn.beta': dict(decay_mult=0.),
            'relative_position_bias_table': dict(decay_mult=0.),
            'norm': dict(decay_mult=0.)
        }),
    optimizer=dict(
        _delete_=True,
        type='AdamW',
        lr=0.0001,
        betas=(0.9, 0.999),
        weight_decay=0.05))
