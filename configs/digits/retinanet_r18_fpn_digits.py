_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    'mmdet::_base_/datasets/coco_detection.py',
    'mmdet::_base_/default_runtime.py'
]
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# model: a quarter of ResNet-18's width, trained from scratch
norm_cfg = dict(type='GN', num_groups=8, requires_grad=True)
model = dict(
    data_preprocessor=dict(mean=[128.] * 3, std=[64.] * 3),
    backbone=dict(
        depth=18,
        base_channels=16,
        stem_channels=16,
        frozen_stages=-1,
        norm_cfg=norm_cfg,
        norm_eval=False,
        init_cfg=None),
    neck=dict(
        in_channels=[16, 32, 64, 128],
        out_channels=64,
        add_extra_convs=False,
        num_outs=3,
        norm_cfg=norm_cfg),
    bbox_head=dict(
        num_classes=10,
        in_channels=64,
        feat_channels=64,
        stacked_convs=2,
        norm_cfg=norm_cfg,
        anchor_generator=dict(
            octave_base_scale=2, ratios=[1.5], strides=[8, 16, 32])))

# data: no flips, which would turn digits into other signs
data_root = 'data/digits/'
scale = (128, 128)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape',
                   'scale_factor'))
]
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        type='DigitsDataset',
        data_root=data_root,
        ann_file='annotations/train.json',
        data_prefix=dict(img='train/'),
        filter_cfg=dict(filter_empty_gt=False, min_size=1),
        pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=10,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        type='DigitsDataset',
        data_root=data_root,
        ann_file='annotations/val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/val.json')
test_evaluator = val_evaluator

# schedule
max_epochs = 6
train_cfg = dict(
    type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=1)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=4e-3, weight_decay=0.01),
    clip_grad=dict(max_norm=10))
param_scheduler = [
    dict(
        type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=200),
    dict(
        type='CosineAnnealingLR',
        begin=0,
        end=max_epochs,
        T_max=max_epochs,
        by_epoch=True,
        convert_to_iter_based=True,
        eta_min_ratio=0.02)
]
auto_scale_lr = dict(enable=False, base_batch_size=8)

default_hooks = dict(
    logger=dict(interval=25),
    checkpoint=dict(interval=1, max_keep_ckpts=2, save_best='coco/bbox_mAP'))
randomness = dict(seed=0)
