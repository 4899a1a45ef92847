// Package remote keeps chunks on other machines: on a Redis or Valkey service, or in a bucket of an
// S3-compatible object store.
//
// # Objects and their names
//
// A chunk is one object, of a header and the encoded pages (see form.go). It is named by its space,
// the digest of its first page, the digest of its last page, and how many pages it has. As digests
// are cumulative, the last one says which prefix the chunk ends, so the name says all about the
// content; and as the space's fingerprint is in the name and in the header, chunks of different
// spaces never meet.
//
// Who looks for a chunk of n pages knows that name, and also those of all chunks that are a
// beginning of it. So a whole chunk, and a partly filled one of which the request knows the
// continuation, are found by asking for names, however many other chunks begin with the same page.
// What leaves the request's prefix in its middle, or is longer, is found by reading the headers of
// the newest maxVariants that begin with the same page; their names come from a listing (S3) or a
// small index (Redis). That bounds what one look can cost; a chunk that is not among them is not
// found that way, which is a miss.
//
// A name is a claim. A header is checked against the name and the run before any byte counts, and
// each page against its checksum, seeded by its digest, after it was decoded. What fails is
// removed, and is ErrCorrupt once.
//
// # Writing
//
// An object is there whole or not at all: S3 does that by itself, in Redis one transaction writes
// the parts and the header. Two sidecars that write one chunk at once write the same name, and the
// later one stays. A longer version is written before the shorter ones that it replaces are
// removed; who looks for a shorter one in between finds the longer. Servers forget at any time
// (eviction, TTL): a part that is gone makes the chunk a miss, and the rest of it is removed.
//
// # Trust
//
// A server is trusted with nothing but to keep bytes: what it answers is bounded before it is read
// into memory (replies, listings, errors) and never panics or hangs a call beyond its deadline.
// Secrets are in no error, log or Stats.
package remote
