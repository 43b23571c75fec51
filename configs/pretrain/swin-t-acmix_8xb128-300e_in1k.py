_base_ = 'mmpretrain::swin_transformer/swin-tiny_16xb64_in1k.py'
custom_imports = dict(
    imports=['acmix_det', 'acmix_det.compat.mmpretrain_neck'],
    allow_failed_imports=False)

# The released code trains as Swin does: 300 epochs, batch 1024, drop path 0.2
# (0.3 for Swin-S); the rest is the base's.
model = dict(
    backbone=dict(
        _delete_=True,
        type='mmdet.ACmixSwinTransformer',
        depths=(2, 2, 6, 2),
        drop_path_rate=0.2,
        out_indices=(3, )),
    neck=dict(type='LastMapMean'))
train_dataloader = dict(batch_size=128)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
