_base_ = '../retinanet_r50-sasa_fpn_1x_coco.py'

model = dict(backbone=dict(attn_cfg=dict(attn_kernel_size=9)))
