"""How long does a plan take and how much memory does it need?"""
