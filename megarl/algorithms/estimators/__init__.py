"""Holds advantage estimators: `algorithm.adv_estimator` names a file here, and the function of the same name in it.

Each is (batch, the section `algorithm`) -> advantages, float32 [T]. `Batch.rewards` are the scores, less the KL to the
reference where that is in the reward; `Batch.token_rewards` are the same per token. A sequence that was not scored has
no trained tokens and takes no part. Advantages at tokens that are not trained are ignored.
"""
