package remote

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

// saltedRun is the pages of the same tokens under a salt, named as vLLM names them: each by the
// hash of the one before and of its own tokens, the first by the salt as well.
func saltedRun(space *tiers.Space, salt string, pages int) tiers.Run {
	var hashes, before []byte
	for i := range pages {
		text := fmt.Appendf(before, "tokens of page %d", i)
		if i == 0 {
			text = append(text, salt...)
		}
		sum := sha256.Sum256(text)
		before = sum[:len(sum):len(sum)]
		hashes = append(hashes, before...)
	}
	return tiers.Run{Space: space, Hashes: hashes}
}

// Fault 43: the same prompt of two tenants with a salt each, in a Redis server and in an S3 bucket
// that both use, and the same digests in two spaces: nothing is shared, neither the bytes nor the
// names that they have there.
func TestSaltsShareNothing(t *testing.T) {
	t.Parallel()
	redisAt := redisServer(t)
	s3At, dir := s3Server(t)
	g := tiers.Geometry{PageBytes: 4096, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32}
	model, other := tiertest.NewSpace("a model", g),
		tiertest.NewSpace("the same model with another hash seed", g)
	const pages = 10
	tenants := []tiers.Run{saltedRun(model, "alice", pages), saltedRun(model, "bob", pages),
		saltedRun(other, "alice", pages)}
	for name, c := range map[string]struct {
		open  func() (*Tier, error)
		names func() []string
	}{
		"redis": {
			func() (*Tier, error) {
				return OpenRedis(RedisOptions{DialTimeout: unhurried, Addrs: []string{redisAt.addr},
					Password: Secret{File: passwordFile(t)}, Prefix: "salted"})
			},
			func() []string {
				keys, err := client(t, redisAt).Keys(t.Context(), "*").Result()
				if err != nil {
					t.Fatal(err)
				}
				return keys
			},
		},
		"s3": {
			func() (*Tier, error) {
				return OpenS3(S3Options{DialTimeout: unhurried, Endpoint: "http://" + s3At.addr,
					Bucket: "kv-cache", Prefix: "salted", CredentialsFile: credentialsFile(t,
						accessKey, password)})
			},
			func() (names []string) {
				bucket := filepath.Join(dir, "kv-cache")
				if err := filepath.WalkDir(bucket, func(path string, e fs.DirEntry,
					err error) error {
					if err == nil && !e.IsDir() {
						names = append(names, strings.TrimPrefix(path, bucket+"/"))
					}
					return err
				}); err != nil {
					t.Fatal(err)
				}
				return names
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			tier, err := c.open()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { tier.Close() })
			awaitReady(t, tier)
			// What each tenant stores is its own, so that a page of another would show.
			fill := func(b []byte, tenant int) {
				for i := range b {
					b[i] = byte(i*7 + tenant)
				}
			}
			transfers := func(tenant int) (ts []tiers.Transfer) {
				for i := range tenants[tenant].Chunks() {
					run := tenants[tenant].Chunk(i)
					ts = append(ts, tiers.Transfer{Run: run,
						Bytes: make([]byte, int64(run.Pages())*g.PageBytes)})
				}
				return ts
			}
			seen := map[string]bool{}
			for tenant := range tenants {
				held := make([]uint16, tenants[tenant].Chunks())
				if err := tier.Contains(t.Context(), tenants[tenant], held); err != nil ||
					held[0]+held[1]+held[2] > 0 {
					t.Errorf("tenant %d has stored nothing, and finds %v: %v", tenant, held, err)
				}
				tier.Load(t.Context(), transfers(tenant), func(i int, err error) {
					if !errors.Is(err, tiers.ErrNotFound) {
						t.Errorf("tenant %d has stored nothing, and loads chunk %d: %v", tenant, i,
							err)
					}
				})
				ts := transfers(tenant)
				for _, x := range ts {
					fill(x.Bytes, tenant)
				}
				tier.Store(t.Context(), ts, func(i int, err error) {
					if err != nil {
						t.Errorf("tenant %d, chunk %d: %v", tenant, i, err)
					}
				})
				fresh := 0
				for _, n := range c.names() {
					if !seen[n] {
						seen[n] = true
						fresh++
					}
					if !plainName.MatchString(n) {
						t.Errorf("%q is not a name of ours", n)
					}
					if strings.Contains(n, "alice") || strings.Contains(n, "bob") {
						t.Errorf("%q has a salt in it", n)
					}
				}
				if fresh < tenants[tenant].Chunks() {
					t.Errorf("tenant %d has %d names of its own for %d chunks", tenant, fresh,
						tenants[tenant].Chunks())
				}
			}
			want := make([]byte, int64(g.PagesPerChunk)*g.PageBytes)
			for tenant := range tenants {
				fill(want, tenant)
				ts := transfers(tenant)
				tier.Load(t.Context(), ts, func(i int, err error) {
					if err != nil || string(ts[i].Bytes) != string(want[:len(ts[i].Bytes)]) {
						t.Errorf("tenant %d loads other bytes of chunk %d than it stored: %v",
							tenant, i, err)
					}
				})
			}
			// Clearing one space leaves the other.
			if _, err := tier.Clear(t.Context(), model.Fingerprint); err != nil {
				t.Fatal(err)
			}
			for tenant, want := range []uint16{0, 0, 4} {
				held := make([]uint16, tenants[tenant].Chunks())
				if err := tier.Contains(t.Context(), tenants[tenant], held); err != nil ||
					held[0] != want {
					t.Errorf("after clearing tenant %d finds %v: %v", tenant, held, err)
				}
			}
		})
	}
}

// plainName is what names in Redis and S3 are made of, besides the prefix of the settings:
// hexadecimal digits and numbers, whatever a client calls its model.
var plainName = regexp.MustCompile(
	`^salted(/[0-9a-f]{64}){2}(/[0-9a-f]{64}-[0-9]+|/\{[0-9a-f]{64}\}-[0-9]+(/[0-9]+)?)?$`)
