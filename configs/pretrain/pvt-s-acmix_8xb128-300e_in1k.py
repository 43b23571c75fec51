_base_ = './pvt-t-acmix_8xb128-300e_in1k.py'

model = dict(backbone=dict(num_layers=[3, 4, 6, 3]))
