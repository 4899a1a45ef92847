// Package tiers has the words that the engine and the tiers share, and the contract of a tier.
//
// A Space is everything that must agree for KV bytes to be reusable; its Fingerprint is part of
// every key. Geometry is how a space's pages lie in slots and how they are named. A Run is
// consecutive pages of one prefix, chunk by chunk. A Tier is somewhere below the arena where chunks
// can live: it may fail, and it may forget, but it must never lie. Package tiertest has the suite
// that every tier passes.
//
// Nothing here is ever truncated: two keys are equal only if every bit of their fingerprints and
// digests is.
package tiers
