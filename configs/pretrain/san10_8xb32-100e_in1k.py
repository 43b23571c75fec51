_base_ = [
    'mmpretrain::_base_/models/resnet50_label_smooth.py',
    'mmpretrain::_base_/datasets/imagenet_bs32.py',
    'mmpretrain::_base_/schedules/imagenet_bs256_coslr.py',
    'mmpretrain::_base_/default_runtime.py'
]
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# The recipe of the SAN paper, which is that of the base: SGD, lr 0.1 for a
# batch of 256, momentum 0.9, weight decay 1e-4, 100 epochs, cosine, label
# smoothing 0.1, crops and flips. ACmix has no code of its SANs.
model = dict(
    backbone=dict(
        _delete_=True, type='mmdet.SAN', depth=10, out_indices=(3, )))
default_hooks = dict(checkpoint=dict(max_keep_ckpts=3))
