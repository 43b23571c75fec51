_base_ = './retinanet_r18_fpn_digits.py'

model = dict(
    backbone=dict(
        type='SASAResNet',
        attn_cfg=dict(num_heads=8, attn_kernel_size=5),
        stage_with_attn=(False, False, True, True)),
    neck=dict(
        type='SASAFPN', attn_cfg=dict(num_heads=8, attn_kernel_size=5)))
