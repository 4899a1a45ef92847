package remote

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"lookaside/tiers/tiertest"
)

// memoryBound is what many calls at once may take when the server lies: their own buffers are a few
// MiB.
const memoryBound = 96 << 20

// mostHeap is the most that Go's heap grows by while do runs.
func mostHeap(do func()) int64 {
	defer debug.SetGCPercent(debug.SetGCPercent(25))
	heap := func() int64 {
		s := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
		metrics.Read(s)
		return int64(s[0].Value.Uint64())
	}
	runtime.GC()
	before, most := heap(), int64(0)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			most = max(most, heap()-before)
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}()
	do()
	close(stop)
	<-stopped
	return most
}

// allAtOnce asks a tier for more chunks at once than it has connections.
func allAtOnce(t *testing.T, tier *Tier) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	space := tiertest.NewSpace("many", geometry)
	var wg sync.WaitGroup
	for i := range byte(40) {
		wg.Go(func() {
			tr := chunkOf(space, i, 2, 3)
			_ = tier.Contains(ctx, tr.Run, make([]uint16, tr.Run.Chunks()))
			if i%4 == 0 {
				_ = tier.Drop(ctx, tr.Run)
				_, _ = tier.Clear(ctx, space.Fingerprint)
			}
			if err := load(ctx, tier, tr); err == nil {
				t.Error("a load is a hit")
			}
		})
	}
	wg.Wait()
}

// TestS3TakesLittle: an S3 server whose answers are endless, or costly to parse, takes no more
// memory than was asked for.
func TestS3TakesLittle(t *testing.T) {
	flood := func(begin, more, status string) http.HandlerFunc {
		more = strings.Repeat(more, 1+4096/len(more))
		return func(w http.ResponseWriter, r *http.Request) {
			code, _ := strconv.Atoi(status)
			w.WriteHeader(code)
			_, _ = io.WriteString(w, begin)
			for sent := 0; sent < 4<<20; sent += len(more) {
				if _, err := io.WriteString(w, more); err != nil {
					return
				}
			}
		}
	}
	for name, h := range map[string]http.HandlerFunc{
		"text":         flood("", "x", "200"),
		"error":        flood("<Error><Code>", "x", "500"),
		"error's tags": flood("<Error>", "<Code>a</Code>", "500"),
		"names":        flood("<ListBucketResult>", "<Contents><Key>a</Key></Contents>", "200"),
		"empty names":  flood("<ListBucketResult>", "<Contents />", "200"),
		"prefixes":     flood("<ListBucketResult>", "<CommonPrefixes/>", "200"),
		"deep":         flood("<ListBucketResult>", "<a>", "200"),
		"attributes":   flood("<ListBucketResult", " a=''", "200"),
		"deleted":      flood("<DeleteResult>", "<Deleted/>", "200"),
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(h)
			defer s.Close()
			defer s.CloseClientConnections()
			tier, err := OpenS3(S3Options{DialTimeout: unhurried, Endpoint: s.URL,
				Bucket: "kv-cache", Region: "us-east-1"})
			if err != nil {
				t.Fatal(err)
			}
			defer tier.Close()
			most := mostHeap(func() { allAtOnce(t, tier) })
			t.Logf("%d MiB", most>>20)
			if most > memoryBound {
				t.Errorf("%d MiB were taken", most>>20)
			}
		})
	}
}

// TestRedisTakesLittle: the same of a Redis server.
func TestRedisTakesLittle(t *testing.T) {
	line := "+" + strings.Repeat("x", 60_000) + "\r\n"
	for name, answer := range map[string]string{
		"long bulk":  "$" + strconv.Itoa(64<<20) + "\r\n" + strings.Repeat("x", 1<<20),
		"long lines": "*200000\r\n" + strings.Repeat(line, 400),
		"short ones": "*200000\r\n" + strings.Repeat("+\r\n", 200_000),
		"bulks": "*200000\r\n" + strings.Repeat("$100000\r\n"+strings.Repeat("x", 100_000)+
			"\r\n", 200),
		"arrays": "*200000\r\n" + strings.Repeat("*1\r\n:1\r\n", 200_000),
	} {
		t.Run(name, func(t *testing.T) {
			addr := fakeRedis(t, func(command string, args []string) string {
				switch command {
				case "zrevrange", "scan", "getrange", "unlink":
					return answer
				}
				return sane(command, args)
			})
			tier := openRedis(t, RedisOptions{Addrs: []string{addr}})
			most := mostHeap(func() { allAtOnce(t, tier) })
			tier.Close()
			t.Logf("%d MiB", most>>20)
			if most > memoryBound {
				t.Errorf("%d MiB were taken", most>>20)
			}
			if r := tier.objects.(*redisObjects); r.replies.Load() != 0 {
				t.Errorf("%d are still counted", r.replies.Load())
			}
		})
	}
}
