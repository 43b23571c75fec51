_base_ = './retinanet_r18-acmix_fpn-acmix_digits.py'

# the towers; the predictors stay convolutions
model = dict(
    bbox_head=dict(
        conv_cfg=dict(type='ACmix', num_heads=8, attn_kernel_size=5)))
