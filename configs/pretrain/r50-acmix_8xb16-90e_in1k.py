_base_ = [
    'mmpretrain::_base_/models/resnet50_label_smooth.py',
    'mmpretrain::_base_/datasets/imagenet_bs32.py',
    'mmpretrain::_base_/schedules/imagenet_bs256.py',
    'mmpretrain::_base_/default_runtime.py'
]
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

model = dict(backbone=dict(type='mmdet.ACmixResNet', norm_eval=False))

# The defaults of the released code: SGD, lr 0.1, momentum 0.9, weight decay
# 1e-4, label smoothing 0.1, 90 epochs, of which 5 of linear warm-up from a
# quarter, then cosine; crops and flips. 128 is the batch of its README.
train_dataloader = dict(batch_size=16)
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=0.25,
        begin=0,
        end=5,
        by_epoch=True,
        convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        begin=5,
        end=90,
        T_max=85,
        by_epoch=True,
        convert_to_iter_based=True)
]
train_cfg = dict(max_epochs=90)
auto_scale_lr = dict(base_batch_size=128)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
