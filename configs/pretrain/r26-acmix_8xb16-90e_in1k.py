_base_ = './r50-acmix_8xb16-90e_in1k.py'

model = dict(backbone=dict(depth=26))
