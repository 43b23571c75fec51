_base_ = './retinanet_r18-sasa_fpn-sasa_digits.py'

model = dict(
    bbox_head=dict(
        type='SASARetinaHead',
        attn_cfg=dict(num_heads=8, attn_kernel_size=5)))
