// Package remote keeps chunks on other machines: on a Redis or Valkey service, or in a bucket of an
// S3-compatible object store.
//
// # Objects and their names
//
// A chunk is one object: a header and the encoded pages (see form.go). Its name has its space, the
// digest of its first page, the digest of its last page, and its number of pages. Digests are
// cumulative, so the last one identifies the whole prefix that the chunk ends, and the name
// identifies the content. The space's fingerprint is in the name and in the header, so chunks of
// different spaces never mix.
//
// A lookup of a chunk of n pages knows that name, and the names of all chunks that are a beginning
// of it. So it finds two kinds of chunks by their names, however many other chunks begin with the
// same page: a whole chunk, and a partly filled chunk whose continuation the request knows. A chunk
// that is longer, or differs from the request after some pages, is found by reading headers. The
// lookup reads the headers of the newest maxVariants chunks that begin with the same page; their
// names come from a listing (S3) or from a small index (Redis). That bounds the cost of a lookup. A
// chunk that is not among them is a miss.
//
// A name is only a claim. A header is checked against the name and the run before any byte is used.
// Each page is checked against its checksum, seeded by its digest, after it was decoded. An object
// that fails is removed, and the call returns ErrCorrupt for it once.
//
// # Writing
//
// An object is there whole or not at all. S3 guarantees that by itself; in Redis one transaction
// writes the parts and the header. Two sidecars that write one chunk at once write the same name,
// and the later one stays. A longer version is written before the shorter ones that it replaces are
// removed, so a lookup of a shorter one finds the longer one in between. Servers drop objects at
// any time (eviction, TTL). A missing part makes the chunk a miss, and the rest of the chunk is
// removed.
//
// # Trust
//
// A server is trusted only to keep bytes. Everything it sends (replies, listings, errors) is
// bounded before it is read into memory, and cannot cause a panic or hold a call beyond its
// deadline. Errors, logs and Stats hold no secrets.
package remote
