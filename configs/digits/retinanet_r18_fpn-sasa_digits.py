_base_ = './retinanet_r18_fpn_digits.py'

model = dict(
    neck=dict(
        type='SASAFPN', attn_cfg=dict(num_heads=8, attn_kernel_size=5)))
