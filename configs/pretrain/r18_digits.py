_base_ = 'mmpretrain::_base_/default_runtime.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# model: the backbone of the digits detectors
data_preprocessor = dict(
    num_classes=10, mean=[128.] * 3, std=[64.] * 3, to_rgb=True)
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='mmdet.ResNet',
        depth=18,
        base_channels=16,
        stem_channels=16,
        out_indices=(3, ),
        norm_cfg=dict(type='GN', num_groups=8, requires_grad=True),
        norm_eval=False),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=128,
        loss=dict(type='CrossEntropyLoss'),
        topk=(1, )))

# data: no flips, which would turn digits into other signs
pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
data_root = 'data/digits_classification'
train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        type='CustomDataset',
        data_root=data_root,
        data_prefix='train',
        pipeline=pipeline),
    sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(
    batch_size=32,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        type='CustomDataset',
        data_root=data_root,
        data_prefix='val',
        pipeline=pipeline),
    sampler=dict(type='DefaultSampler', shuffle=False))
test_dataloader = val_dataloader
val_evaluator = dict(type='Accuracy', topk=(1, ))
test_evaluator = val_evaluator

# schedule
max_epochs = 10
train_cfg = dict(by_epoch=True, max_epochs=max_epochs)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=4e-3, weight_decay=0.01),
    clip_grad=dict(max_norm=10))
param_scheduler = [
    dict(
        type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=20),
    dict(
        type='CosineAnnealingLR',
        begin=0,
        end=max_epochs,
        T_max=max_epochs,
        by_epoch=True,
        convert_to_iter_based=True,
        eta_min_ratio=0.02)
]
auto_scale_lr = dict(base_batch_size=32)
default_hooks = dict(
    logger=dict(interval=25), checkpoint=dict(max_keep_ckpts=2))
randomness = dict(seed=0)
