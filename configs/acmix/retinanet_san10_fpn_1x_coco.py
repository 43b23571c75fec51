_base_ = '../sasa/retinanet_r50-scratch_fpn_1x_coco.py'

# Some norms have two channels, too few for group norm. SyncBN takes its
# statistics over all GPUs.
model = dict(
    backbone=dict(
        _delete_=True,
        type='SAN',
        depth=10,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        norm_eval=False))
