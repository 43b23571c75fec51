_base_ = './r18_digits.py'

model = dict(
    backbone=dict(
        type='mmdet.ACmixResNet',
        attn_cfg=dict(num_heads=8, attn_kernel_size=5),
        stage_with_attn=(False, False, True, True)))
