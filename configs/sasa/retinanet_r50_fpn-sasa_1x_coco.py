_base_ = 'mmdet::retinanet/retinanet_r50_fpn_1x_coco.py'
custom_imports = dict(imports=['acmix_det'], allow_failed_imports=False)

# The backbone keeps its ImageNet weights.
model = dict(neck=dict(type='SASAFPN'))
optim_wrapper = dict(clip_grad=dict(max_norm=10, norm_type=2))
