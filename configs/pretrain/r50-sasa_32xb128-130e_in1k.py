_base_ = [
    'mmpretrain::_base_/models/resnet50_label_smooth.py',
    'mmpretrain::_base_/datasets/imagenet_bs32.py',
    'mmpretrain::_base_/schedules/imagenet_bs256.py',
    'mmpretrain::_base_/default_runtime.py'
]
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

model = dict(backbone=dict(type='mmdet.SASAResNet', norm_eval=False))

# From the paper's appendix: Nesterov, lr 1.6 for a batch of 4096, 130 epochs,
# of which 10 of linear warm-up, then cosine; averaged weights (0.9999).
# Chosen here, since not told there: momentum, weight decay, label smoothing,
# crops and flips. Different here: its batch norms have a decay of 0.9999,
# ours PyTorch's momentum, which needs fewer iterations.
train_dataloader = dict(batch_size=128)
val_dataloader = dict(batch_size=128)
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=1.6, nesterov=True))
param_scheduler = [
    dict(
        type='LinearLR',
        start_factor=1e-3,
        begin=0,
        end=10,
        by_epoch=True,
        convert_to_iter_based=True),
    dict(
        type='CosineAnnealingLR',
        begin=10,
        end=130,
        T_max=120,
        by_epoch=True,
        convert_to_iter_based=True)
]
train_cfg = dict(max_epochs=130)
auto_scale_lr = dict(base_batch_size=4096)
# the averaged weights are the state_dict of a checkpoint
custom_hooks = [dict(type='EMAHook', momentum=1e-4, priority='ABOVE_NORMAL')]
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
