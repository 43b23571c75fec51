# Data and schedule of the detectors in 'Stand-Alone Self-Attention in Vision
# Models'. The paper gives: multi-scale jitter, a crop of 640, flips, batch 64,
# lr 0.12 after one epoch of warm-up, cosine to 0, 150 epochs. Not given, hence
# chosen here: jitter 0.1 to 2 (as mmdet's large-scale jitter), momentum and
# weight decay (mmdet's), gradient clipping.
_base_ = 'mmdet::_base_/datasets/coco_detection.py'

# data
image_size = (640, 640)
backend_args = None
train_pipeline = [
    dict(type='LoadImageFromFile', backend_args=backend_args),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='RandomResize',
        scale=image_size,
        ratio_range=(0.1, 2.0),
        keep_ratio=True),
    dict(
        type='RandomCrop',
        crop_type='absolute_range',
        crop_size=image_size,
        recompute_bbox=True,
        allow_negative_crop=True),
    dict(type='FilterAnnotations', min_gt_bbox_wh=(1e-2, 1e-2)),
    dict(type='RandomFlip', prob=0.5),
    dict(type='Pad', size=image_size, pad_val=dict(img=(114, 114, 114))),
    dict(type='PackDetInputs')
]
test_pipeline = [
    dict(type='LoadImageFromFile', backend_args=backend_args),
    dict(type='Resize', scale=image_size, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True),
    dict(
        type='PackDetInputs',
        meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape',
                   'scale_factor'))
]
train_dataloader = dict(
    batch_size=8, num_workers=8, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

# schedule
max_epochs = 150
train_cfg = dict(
    type='EpochBasedTrainLoop', max_epochs=max_epochs, val_interval=10)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='SGD', lr=0.12, momentum=0.9, weight_decay=0.0001),
    clip_grad=dict(max_norm=10, norm_type=2))
param_scheduler = [
    # not from 0, where the scheduler cannot start
    dict(
        type='LinearLR',
        start_factor=0.001,
        begin=0,
        end=1,
        by_epoch=True,
        convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        eta_min=0,
        begin=1,
        end=max_epochs,
        T_max=max_epochs - 1,
        by_epoch=True,
        convert_to_iter_based=True)
]
# (8 GPUs) x (8 images)
auto_scale_lr = dict(enable=False, base_batch_size=64)
