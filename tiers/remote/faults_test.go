package remote

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

var geometry = tiers.Geometry{PageBytes: 8 << 10, PagesPerChunk: 4, PageTokens: 16, DigestBytes: 32}

// chunkOf is the first chunk of a prefix that begins with its own tokens, and memory with its
// bytes.
func chunkOf(space *tiers.Space, tokens ...byte) tiers.Transfer {
	run := tiertest.Prefix(tokens).Run(space, 0, len(tokens))
	t := tiers.Transfer{Run: run, Bytes: make([]byte, len(tokens)*int(space.Geometry.PageBytes))}
	tiertest.FillRun(t.Bytes, run)
	return t
}

func load(ctx context.Context, tier tiers.Tier, t tiers.Transfer) (err error) {
	t.Bytes = make([]byte, len(t.Bytes))
	tier.Load(ctx, []tiers.Transfer{t}, func(_ int, e error) { err = e })
	if page := tiertest.WrongPage(t.Bytes, t.Run); err == nil && page >= 0 {
		panic(fmt.Sprintf("page %d is wrong", page))
	}
	return err
}

func store(ctx context.Context, tier tiers.Tier, ts ...tiers.Transfer) error {
	errs := make([]error, len(ts))
	tier.Store(ctx, ts, func(i int, e error) { errs[i] = e })
	return errors.Join(errs...)
}

func mustStore(t *testing.T, tier tiers.Tier, ts ...tiers.Transfer) {
	t.Helper()
	if err := store(t.Context(), tier, ts...); err != nil {
		t.Fatal(err)
	}
}

func held(t *testing.T, tier tiers.Tier, run tiers.Run) []uint16 {
	t.Helper()
	out := make([]uint16, run.Chunks())
	if err := tier.Contains(t.Context(), run, out); err != nil {
		t.Fatal(err)
	}
	return out
}

// everyCall makes every call of a tier, and returns their errors by name.
func everyCall(ctx context.Context, tier *Tier, tr tiers.Transfer) map[string]error {
	out := map[string]error{}
	out["Contains"] = tier.Contains(ctx, tr.Run, make([]uint16, tr.Run.Chunks()))
	out["Load"] = load(ctx, tier, tr)
	out["Store"] = store(ctx, tier, tr)
	out["Drop"] = tier.Drop(ctx, tr.Run)
	_, out["Clear"] = tier.Clear(ctx, tr.Space.Fingerprint)
	out["Check"] = tier.Check(ctx)
	return out
}

// A server that dies and comes back: failures, misses, and then all is as before.
func TestRedisRestarts(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	tier := openRedis(t, RedisOptions{Addrs: []string{s.addr},
		Password: Secret{File: passwordFile(t)}})
	space := tiertest.NewSpace("restarts", geometry)
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	var hits, failures atomic.Int64
	for w := range byte(4) {
		running.Go(func() {
			for i := byte(0); ctx.Err() == nil; i++ {
				call, end := context.WithTimeout(context.Background(), 2*time.Second)
				tr := chunkOf(space, w, i%8, 0, 0)
				serr, lerr := store(call, tier, tr), load(call, tier, tr)
				if lerr == nil {
					hits.Add(1)
				}
				if serr != nil || lerr != nil && !errors.Is(lerr, tiers.ErrNotFound) {
					failures.Add(1)
				}
				end()
			}
		})
	}
	wait := func(n *atomic.Int64) {
		t.Helper()
		for at, deadline := n.Load(), time.Now().Add(unhurried); n.Load() < at+
			20; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Errorf("nothing happens: %d hits, %d failures", hits.Load(), failures.Load())
				return
			}
		}
	}
	for range 3 {
		wait(&hits)
		s.kill()
		wait(&failures)
		s.start()
	}
	wait(&hits)
	cancel()
	running.Wait()
	if n := tier.Stats().Corrupt; n > 0 {
		t.Errorf("%d chunks are said to have been corrupt", n)
	}
}

// A server that is stopped: every call ends when its time is over.
func TestDeadlines(t *testing.T) {
	rs := redisServer(t)
	ss, _ := s3Server(t)
	s3, err := OpenS3(S3Options{DialTimeout: unhurried, Endpoint: "http://" + ss.addr,
		Bucket: "kv-cache", CredentialsFile: credentialsFile(t, accessKey, password)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s3.Close() })
	// Nobody accepts there, and nobody refuses.
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	redis := openRedis(t, RedisOptions{Addrs: []string{rs.addr},
		Password: Secret{File: passwordFile(t)}})
	nobody := openRedis(t, RedisOptions{Addrs: []string{mute.Addr().String()}})
	tr := chunkOf(tiertest.NewSpace("deadlines", geometry), 1, 2, 3, 4)
	mustStore(t, redis, tr)
	mustStore(t, s3, tr)
	defer stalled(rs, ss)()()
	cause := errors.New("time is over")
	for what, tier := range map[string]*Tier{"redis": redis, "s3": s3, "mute": nobody} {
		for name, call := range map[string]func(ctx context.Context) error{
			"Contains": func(ctx context.Context) error {
				return tier.Contains(ctx, tr.Run,
					make([]uint16, 1))
			},
			"Load":  func(ctx context.Context) error { return load(ctx, tier, tr) },
			"Store": func(ctx context.Context) error { return store(ctx, tier, tr) },
			"Drop":  func(ctx context.Context) error { return tier.Drop(ctx, tr.Run) },
			"Clear": func(ctx context.Context) error {
				_,
					err := tier.Clear(ctx, tiers.Fingerprint{})
				return err
			},
			"Check": tier.Check,
		} {
			ctx, cancel := context.WithTimeoutCause(t.Context(), 60*time.Millisecond, cause)
			start := time.Now()
			err := call(ctx)
			if took := time.Since(start); !errors.Is(err, cause) || took > 30*time.Second {
				t.Errorf("%s %s: %v after %v", what, name, err, took)
			}
			cancel()
		}
		// Close does not wait for a server.
		started := make(chan struct{})
		ended := make(chan error)
		go func() {
			close(started)
			ended <- tier.Contains(context.Background(), tr.Run, make([]uint16, 1))
		}()
		<-started
		time.Sleep(20 * time.Millisecond)
		start := time.Now()
		tier.Close()
		if err := <-ended; !errors.Is(err, tiers.ErrClosed) || time.Since(start) > 30*time.Second {
			t.Errorf("%s: a call under way when Close came: %v after %v", what, err,
				time.Since(start))
		}
	}
}

// fakeRedis answers each command by what answer returns; "" ends the connection.
func fakeRedis(t *testing.T, answer func(command string, args []string) string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	ended, end := context.WithCancel(context.Background())
	conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer context.AfterFunc(ended, func() { c.Close() })()
				defer c.Close()
				serveRedis(c, answer)
			})
		}
	})
	t.Cleanup(func() { l.Close(); end(); conns.Wait() })
	return l.Addr().String()
}

func serveRedis(c net.Conn, answer func(command string, args []string) string) {
	r := bufio.NewReader(c)
	line := func() (int, error) {
		s, err := r.ReadString('\n')
		if err != nil || len(s) < 3 {
			return 0, io.ErrUnexpectedEOF
		}
		return strconv.Atoi(s[1 : len(s)-2])
	}
	for {
		n, err := line()
		if err != nil {
			return
		}
		var words []string
		for range n {
			size, err := line()
			if err != nil {
				return
			}
			b := make([]byte, size+2)
			if _, err := io.ReadFull(r, b); err != nil {
				return
			}
			words = append(words, string(b[:size]))
		}
		a := answer(strings.ToLower(words[0]), words[1:])
		if a == "" {
			return
		}
		for len(a) > 0 { // without a copy of the whole
			n := min(len(a), 64<<10)
			if _, err := io.WriteString(c, a[:n]); err != nil {
				return
			}
			a = a[n:]
		}
	}
}

// sane answers as an empty server would.
func sane(command string, args []string) string {
	switch command {
	case "hello", "zrevrange":
		return "*0\r\n"
	case "scan":
		return "*2\r\n$1\r\n0\r\n*0\r\n"
	case "getrange":
		return "$0\r\n\r\n"
	case "exists", "unlink", "zrem", "zadd", "zremrangebyrank":
		return ":0\r\n"
	case "set":
		return "+QUEUED\r\n"
	case "exec":
		return "*4\r\n+OK\r\n+OK\r\n:1\r\n:0\r\n"
	}
	return "+OK\r\n"
}

// Servers that answer anything: no call panics, hangs, takes memory or gives a wrong byte.
func TestRedisGarbage(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	answers := map[string]string{
		"nothing":        "",
		"http":           "HTTP/1.1 400 Bad Request\r\n\r\n",
		"no end":         "+OK",
		"half":           "$100\r\nabc",
		"huge":           "$99999999999\r\nabc",
		"largest":        "$9223372036854775807\r\n",
		"too large":      "$9223372036854775808\r\n",
		"negative":       "$-7\r\n",
		"no number":      "$x\r\n",
		"empty":          "\r\n",
		"line feed":      "\n",
		"huge array":     "*1000000000\r\n",
		"negative array": "*-1\r\n",
		"deep":           strings.Repeat("*1\r\n", 100_000),
		"wide":           strings.Repeat("*2\r\n:1\r\n", 100_000),
		"many arrays":    "*200\r\n" + strings.Repeat("*200000\r\n", 200),
		"long line":      "+" + long + long + "\r\n",
		"long error":     "-ERR " + long[:50_000] + "\r\n",
		"endless":        strings.Repeat(long, 300),
		"nil":            "$-1\r\n",
		"array":          "*2\r\n$1\r\na\r\n$1\r\nb\r\n",
		"string":         "$5\r\nhello\r\n",
		"number":         ":12345\r\n",
		"odd number":     ":zwölf\r\n",
		"a value":        "$" + strconv.Itoa(len(long)) + "\r\n" + long + "\r\n",
		"no tail":        "$5\r\nhelloXY",
		"map":            "%1000000000\r\n",
		"push":           ">3\r\n+a\r\n+b\r\n+c\r\n",
		"big number":     "(" + strings.Repeat("9", 60_000) + "\r\n",
		"error":          "-ERR no\r\n",
		"moved":          "-MOVED 1 127.0.0.1:1\r\n",
		"wrong type":     "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
		"two answers":    "+OK\r\n:1\r\n",
	}
	tr := chunkOf(tiertest.NewSpace("garbage", geometry), 1, 2, 3)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for name, bad := range answers {
		for _, at := range []string{"hello", "exists", "zrevrange", "getrange", "scan", "unlink",
			"zrem", "multi", "set", "exec"} {
			var met atomic.Bool
			addr := fakeRedis(t, func(command string, args []string) string {
				if command == at {
					met.Store(true)
					return bad
				}
				if command == "exists" && at != "set" && at != "multi" && at != "exec" {
					return ":2\r\n"
				}
				return sane(command, args)
			})
			tier := openRedis(t, RedisOptions{Addrs: []string{addr}})
			// On a busy machine a deadline may pass before the command is sent.
			for try := 0; try == 0 || !met.Load() && try < 50; try++ {
				for call := range everyCallUnder(t, 100*time.Millisecond, tier, tr) {
					if err := call.err; call.name == "Load" && err == nil {
						t.Errorf("%s to %s: a load is a hit", name, at)
					}
				}
			}
			if !met.Load() {
				t.Errorf("%s is never sent", at)
			}
			tier.Close()
		}
	}
	runtime.ReadMemStats(&after)
	if grown := after.Sys - min(before.Sys, after.Sys); grown > 512<<20 {
		t.Errorf("the process grew by %d bytes", grown)
	}
}

type outcome struct {
	name string
	err  error
}

func everyCallUnder(t *testing.T, d time.Duration, tier *Tier, tr tiers.Transfer) func(
	yield func(outcome) bool) {
	return func(yield func(outcome) bool) {
		ctx, cancel := context.WithTimeout(t.Context(), d)
		defer cancel()
		for name, err := range everyCall(ctx, tier, tr) {
			if !yield(outcome{name, err}) {
				return
			}
		}
	}
}

// FuzzGuard: the guard neither panics nor lets a length through that is too large, however the
// stream is cut.
func FuzzGuard(f *testing.F) {
	f.Add([]byte("*2\r\n$3\r\nfoo\r\n:1\r\n+OK\r\n$-1\r\n"), uint16(1))
	f.Add([]byte("$70000\r\nxx"), uint16(3))
	f.Add([]byte("*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n"), uint16(100))
	f.Fuzz(func(t *testing.T, b []byte, cut uint16) {
		var all atomic.Int64
		whole, pieces := &guard{maxValue: 1000, all: new(atomic.Int64)},
			&guard{maxValue: 1000, all: &all}
		werr := whole.scan(b)
		var perr error
		for rest := b; len(rest) > 0 && perr == nil; {
			n := min(int(cut)+1, len(rest))
			perr = pieces.scan(rest[:n])
			rest = rest[n:]
		}
		if (werr == nil) != (perr == nil) {
			t.Fatalf("%v in one piece, %v in pieces", werr, perr)
		}
		if werr == nil && (whole.skip != pieces.skip || len(whole.open) != len(pieces.open) ||
			whole.skip > 1002 || whole.elements > maxReplyElements ||
			len(whole.open) > maxReplyDepth) {
			t.Fatalf("%+v\n%+v", whole, pieces)
		}
		if all.Load() > maxReplies || werr == nil && len(pieces.open) == 0 && all.Load() != 0 {
			t.Fatalf("%d are taken", all.Load())
		}
	})
}

// What is wrong with settings is said in words of the settings, and without secrets.
func TestRedisRefuses(t *testing.T) {
	t.Parallel()
	files := certificates(t)
	port := freePort(t)
	secure := redisServerOn(t, port, "--port", "0", "--tls-port", strconv.Itoa(port),
		"--tls-ca-cert-file", files.CA, "--tls-cert-file", files.Cert, "--tls-key-file", files.Key)
	plain := redisServer(t, "--user", "reader", "on", ">hunter2-and-more", "~*", "+@read",
		"+@connection")
	wrong := filepath.Join(t.TempDir(), "wrong")
	if err := os.WriteFile(wrong, []byte("hunter2-and-more"), 0o600); err != nil {
		t.Fatal(err)
	}
	other := certificates(t)
	// Old servers repeat what they do not understand.
	parrot := fakeRedis(t, func(command string, args []string) string {
		return fmt.Sprintf("-ERR unknown command '%s', with args beginning with: '%s'\r\n", command,
			strings.Join(args, "' '"))
	})
	file := Secret{File: passwordFile(t)}
	for name, c := range map[string]struct {
		o    RedisOptions
		want string
	}{
		"wrong password": {RedisOptions{Addrs: []string{plain.addr},
			Password: Secret{File: wrong}}, "password_file"},
		"no password": {RedisOptions{Addrs: []string{plain.addr}},
			"wants a password: set password_file or password_env"},
		"unknown user": {RedisOptions{Addrs: []string{plain.addr}, User: "nobody",
			Password: file}, "the user in url"},
		"may not write": {RedisOptions{Addrs: []string{plain.addr}, User: "reader",
			Password: Secret{File: wrong}}, "user in url"},
		"no TLS": {RedisOptions{Addrs: []string{secure.addr}, Password: file}, ""},
		"other authority": {RedisOptions{Addrs: []string{secure.addr}, Password: file, TLS: true,
			Files: other}, "ca_file"},
		"no certificate": {RedisOptions{Addrs: []string{secure.addr}, Password: file, TLS: true,
			Files: TLSFiles{CA: files.CA}}, "TLS"},
		"TLS to plain": {RedisOptions{DialTimeout: 500 * time.Millisecond,
			Addrs: []string{plain.addr}, Password: file, TLS: true, Files: files},
			"whether url should say rediss"},
		"parrot": {RedisOptions{Addrs: []string{parrot}, User: "me",
			Password: Secret{File: wrong}}, "unknown command"},
		"nobody there": {RedisOptions{Addrs: []string{fmt.Sprintf("127.0.0.1:%d", freePort(t))},
			Password: file}, "connection refused"},
		"no such sentinel": {RedisOptions{Mode: RedisSentinel, Master: "m",
			Addrs: []string{fmt.Sprintf("127.0.0.1:%d", freePort(t))}, Password: file}, "sentinel"},
		"no cluster": {RedisOptions{Mode: RedisCluster, Addrs: []string{plain.addr},
			Password: file}, "cluster"},
	} {
		tier := openRedis(t, c.o)
		ctx, cancel := context.WithTimeout(t.Context(), unhurried)
		tr := chunkOf(tiertest.NewSpace("refuses", geometry), 1, 2, 3, 4)
		all := everyCall(ctx, tier, tr)
		for call, err := range all {
			if err == nil && name != "may not write" {
				t.Errorf("%s: %s passes", name, call)
			}
			if err != nil && (strings.Contains(err.Error(), "hunter2") ||
				strings.Contains(err.Error(), password)) {
				t.Errorf("%s: %s: the password is in the error: %v", name, call, err)
			}
		}
		if err := all["Store"]; err == nil || !strings.Contains(err.Error(), c.want) ||
			len(err.Error()) > 600 {
			t.Errorf("%s: %v, want something of %q", name, err, c.want)
		} else {
			t.Logf("%s: %v", name, err)
		}
		if d := tier.Stats().Detail; strings.Contains(d, "hunter2") ||
			strings.Contains(d, password) {
			t.Errorf("the password is in Stats: %s", d)
		}
		cancel()
	}
	for _, o := range []RedisOptions{
		{Addrs: []string{"h:1"}, Password: Secret{File: "/none"}}, {Addrs: []string{"h:1"},
			Password: Secret{Env: "REMOTE_TEST_NONE"}},
		{Addrs: []string{"h:1"}, TLS: true, Files: TLSFiles{CA: "/none"}}, {Addrs: []string{"h:1"},
			TLS: true, Files: TLSFiles{CA: wrong}},
		{Addrs: []string{"h:1"}, TLS: true, Files: TLSFiles{Cert: files.Cert}},
		{Addrs: []string{"h"}}, {},
	} {
		if _, err := OpenRedis(o); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestS3Refuses(t *testing.T) {
	t.Parallel()
	s, _ := s3Server(t)
	http := "http://" + s.addr
	for name, c := range map[string]struct {
		o    S3Options
		want string
	}{
		"wrong key": {S3Options{Endpoint: http, Bucket: "kv-cache",
			CredentialsFile: credentialsFile(t, "nobody", password)}, "credentials_file"},
		"wrong secret": {S3Options{Endpoint: http, Bucket: "kv-cache",
			CredentialsFile: credentialsFile(t, accessKey, "hunter2")}, "credentials_file"},
		"no bucket": {S3Options{Endpoint: http, Bucket: "none",
			CredentialsFile: credentialsFile(t, accessKey, password)}, "bucket is not there"},
		"no credentials": {S3Options{Endpoint: http, Bucket: "kv-cache",
			AccessKeyEnv: "REMOTE_TEST_NONE", SecretKeyEnv: "REMOTE_TEST_NONE2"}, "credentials"},
		"no TLS there": {S3Options{Endpoint: "https://" + s.addr, Bucket: "kv-cache",
			CredentialsFile: credentialsFile(t, accessKey, password)}, "https"},
		"nobody is there": {S3Options{Endpoint: fmt.Sprintf("http://127.0.0.1:%d", freePort(t)),
			Bucket: "kv-cache", CredentialsFile: credentialsFile(t, accessKey, password)},
			"refused"},
	} {
		c.o.DialTimeout = unhurried
		tier, err := OpenS3(c.o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), unhurried)
		all := everyCall(ctx, tier, chunkOf(tiertest.NewSpace("refuses", geometry), 1, 2, 3, 4))
		for call, err := range all {
			// Whether a bucket is there is said without a name.
			if call != "Check" && (err == nil || errors.Is(err, tiers.ErrNotFound)) &&
				!(name == "no bucket" && (call == "Contains" || call == "Load")) {
				t.Errorf("%s: %s: %v", name, call, err)
			}
			if err != nil && (strings.Contains(err.Error(), "hunter2") ||
				strings.Contains(err.Error(), password)) {
				t.Errorf("%s: %s: the secret is in the error: %v", name, call, err)
			}
		}
		if err := all["Store"]; err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want something of %q", name, err, c.want)
		} else {
			t.Logf("%s: %v", name, err)
		}
		cancel()
		tier.Close()
	}
	for _, o := range []S3Options{{Bucket: "kv-cache", CredentialsFile: "/none"},
		{Bucket: "kv-cache", CredentialsFile: os.DevNull}, {Bucket: "x"},
		{Bucket: "kv-cache", Files: TLSFiles{CA: "/none"}}} {
		if _, err := OpenS3(o); err == nil {
			t.Errorf("%+v passes", o)
		}
	}
}

// A server with little memory that evicts: what is loaded is right, the rest is a miss. One that
// does not evict has no room.
func TestRedisMaxmemory(t *testing.T) {
	t.Parallel()
	space := tiertest.NewSpace("maxmemory", tiers.Geometry{PageBytes: 64 << 10, PagesPerChunk: 4,
		PageTokens: 16, DigestBytes: 32})
	s := redisServer(t, "--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru")
	tier := openRedis(t, RedisOptions{Addrs: []string{s.addr},
		Password: Secret{File: passwordFile(t)}, SplitBytes: minSplit})
	const seed = 1
	rnd := rand.New(rand.NewPCG(seed, 0))
	hits, misses := 0, 0
	for i := range 400 {
		mustStore(t, tier, chunkOf(space, byte(i), byte(i>>8), 0, 0))
		at := rnd.IntN(i + 1)
		tr := chunkOf(space, byte(at), byte(at>>8), 0, 0)
		switch err := load(t.Context(), tier, tr); {
		case err == nil:
			hits++
		case errors.Is(err, tiers.ErrNotFound):
			misses++
			// What was left of it is gone: it is not said to be there again.
			if held(t, tier, tr.Run)[0] == 4 {
				t.Errorf("chunk %d is a miss, and said to be there", at)
			}
		default:
			t.Fatal(err)
		}
	}
	t.Logf("seed %d: %d hits, %d misses", seed, hits, misses)
	if hits == 0 || misses == 0 || tier.Stats().Corrupt > 0 {
		t.Errorf("%d hits, %d misses, %+v", hits, misses, tier.Stats())
	}
	full := redisServer(t, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
	tier = openRedis(t, RedisOptions{Addrs: []string{full.addr},
		Password: Secret{File: passwordFile(t)}})
	for i := range byte(100) {
		tr := chunkOf(space, i, 1, 1, 1)
		if err := store(t.Context(), tier, tr); err != nil {
			if !errors.Is(err, tiers.ErrBusy) || !strings.Contains(err.Error(), "maxmemory") {
				t.Errorf("Store into a full server: %v", err)
			}
			if err := load(t.Context(), tier, tr); !errors.Is(err, tiers.ErrNotFound) {
				t.Errorf("Load of what found no room: %v", err)
			}
			return
		}
	}
	t.Error("100 chunks of 256 KiB find room in 8 MiB")
}

// Keys that vanish between Contains and Load, are of another type, or not what they should be.
func TestRedisVanishing(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	c := client(t, s)
	tier := openRedis(t, RedisOptions{Addrs: []string{s.addr},
		Password: Secret{File: passwordFile(t)}, SplitBytes: minSplit})
	space := tiertest.NewSpace("vanishing", tiers.Geometry{PageBytes: 40 << 10, PagesPerChunk: 4,
		PageTokens: 16, DigestBytes: 32})
	tr := chunkOf(space, 1, 2, 3, 4)
	ctx := t.Context()
	for name, do := range map[string]struct {
		do   func(root string)
		want error
	}{
		"header":       {func(root string) { c.Del(ctx, root) }, tiers.ErrNotFound},
		"first part":   {func(root string) { c.Del(ctx, root+"/0") }, tiers.ErrNotFound},
		"last part":    {func(root string) { c.Del(ctx, root+"/2") }, tiers.ErrNotFound},
		"short part":   {func(root string) { c.Set(ctx, root+"/1", "x", 0) }, tiers.ErrCorrupt},
		"short header": {func(root string) { c.Set(ctx, root, "x", 0) }, tiers.ErrCorrupt},
		"other header": {func(root string) { c.SetRange(ctx, root, 30, "xx") }, tiers.ErrCorrupt},
		"swapped parts": {func(root string) {
			a := c.Get(ctx, root+"/0").Val()
			c.Set(ctx,
				root+"/1", a, 0)
		}, tiers.ErrCorrupt},
		"longer part": {func(root string) {
			c.Append(ctx, root+"/1",
				strings.Repeat("x", 1<<20))
		}, nil},
		"a list": {func(root string) { c.Del(ctx, root+"/1"); c.LPush(ctx, root+"/1", "x") },
			errors.ErrUnsupported},
	} {
		mustStore(t, tier, tr)
		roots := c.Keys(ctx, "la1/*}-4").Val()
		if len(roots) != 1 {
			t.Fatal(roots)
		}
		do.do(roots[0])
		err := load(ctx, tier, tr)
		if !errors.Is(err, do.want) && !(do.want == errors.ErrUnsupported && err != nil) {
			t.Errorf("%s: %v, want %v", name, err, do.want)
		}
		if left := c.Keys(ctx, "*").Val(); (do.want == tiers.ErrNotFound ||
			do.want == tiers.ErrCorrupt) && name != "header" && len(left) > 0 {
			t.Errorf("%s: left behind: %q", name, left)
		}
		if err := tier.Drop(ctx, tr.Run); err != nil {
			t.Errorf("%s: Drop: %v", name, err)
		}
		if _, err := tier.Clear(ctx, tiers.Fingerprint{}); err != nil {
			t.Errorf("%s: Clear: %v", name, err)
		}
		if left := c.Keys(ctx, "*").Val(); len(left) > 0 {
			t.Errorf("%s: left behind by Clear: %q", name, left)
		}
	}
}

func TestRedisTTL(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	c := client(t, s)
	tr := chunkOf(tiertest.NewSpace("ttl", geometry), 1, 2, 3)
	for _, ttl := range []time.Duration{time.Hour, time.Second} {
		tier := openRedis(t, RedisOptions{Addrs: []string{s.addr},
			Password: Secret{File: passwordFile(t)}, TTL: ttl, Prefix: fmt.Sprint(ttl)})
		mustStore(t, tier, tr)
		keys := func() []string {
			return c.Keys(t.Context(), tier.objects.(*redisObjects).o.Prefix+
				"/*").Val()
		}
		if ttl == time.Hour { // much longer than this takes
			if err := load(t.Context(), tier, tr); err != nil {
				t.Fatal(err)
			}
			all := keys()
			if len(all) == 0 {
				t.Error("no keys")
			}
			for _, k := range all {
				if d := c.PTTL(t.Context(), k).Val(); d <= ttl/2 || d > ttl {
					t.Errorf("%s lasts %v", k, d)
				}
			}
			continue
		}
		for end := time.Now().Add(unhurried); len(keys()) > 0; time.Sleep(50 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("after their time: %q", keys())
			}
		}
		if err := load(t.Context(), tier, tr); !errors.Is(err, tiers.ErrNotFound) {
			t.Errorf("after its time: %v", err)
		}
		if left := keys(); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	}
}

// Very many chunks that begin with the same page: each is found whole, also as the beginning of a
// longer request, and the index stays small.
func TestManyVariants(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	c := client(t, s)
	tier := openRedis(t, RedisOptions{Addrs: []string{s.addr},
		Password: Secret{File: passwordFile(t)}})
	space := tiertest.NewSpace("variants", tiers.Geometry{PageBytes: 256, PagesPerChunk: 4,
		PageTokens: 16, DigestBytes: 16})
	const n = 1000
	var all []tiers.Transfer
	for i := range n {
		all = append(all, chunkOf(space, []byte{1, 2 + byte(i%250), byte(i / 250), 0}[:2+i%3]...))
	}
	mustStore(t, tier, all...)
	for i, tr := range all {
		if err := load(t.Context(), tier, tr); err != nil {
			t.Fatalf("variant %d of %d pages: %v", i, tr.Pages(), err)
		}
		if longer := chunkOf(space, 1, 2+byte(i%250), byte(i/250), 0); i%3 == 1 {
			// stored were its first 3 pages
			if got := held(t, tier, longer.Run)[0]; got < 3 {
				t.Fatalf("of variant %d, %d pages are held", i, got)
			}
		}
	}
	for _, k := range c.Keys(t.Context(), "*").Val() {
		if c.Type(t.Context(), k).Val() == "zset" {
			if got := c.ZCard(t.Context(), k).Val(); got > maxIndex {
				t.Errorf("an index of %d", got)
			}
		}
	}
	// One that leaves them all behind the first page.
	if got := held(t, tier, chunkOf(space, 1, 1, 1, 1).Run)[0]; got != 1 {
		t.Errorf("%d pages in common, want 1", got)
	}
	if err := load(t.Context(), tier, chunkOf(space, 1)); err != nil {
		t.Errorf("the page that all have in common: %v", err)
	}
	// All that have the page, whether the index knows them or not.
	if err := tier.Drop(t.Context(), chunkOf(space, 1).Run); err != nil {
		t.Fatal(err)
	}
	if left := c.Keys(t.Context(), "*").Val(); len(left) > 0 {
		t.Errorf("%d left behind by Drop: %q", len(left), left[0])
	}
}

// Several sidecars that store one chunk at once, with bytes that differ, as those of different GPUs
// may: a load gives those of one of them.
func TestWritersAtOnce(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	space := tiertest.NewSpace("writers", tiers.Geometry{PageBytes: 48 << 10, PagesPerChunk: 8,
		PageTokens: 16, DigestBytes: 32})
	o := RedisOptions{Addrs: []string{s.addr}, Password: Secret{File: passwordFile(t)},
		SplitBytes: minSplit}
	a, b, reader := openRedis(t, o), openRedis(t, o), openRedis(t, o)
	for round := range byte(40) {
		run := chunkOf(space, round, 1, 2, 3, 4, 5, 6, 7).Run
		var running sync.WaitGroup
		for i, tier := range []*Tier{a, b} {
			running.Go(func() {
				bytes := bytes.Repeat([]byte{byte(i + 1)}, 8*48<<10)
				if err := store(t.Context(), tier, tiers.Transfer{Run: run,
					Bytes: bytes}); err != nil {
					t.Error(err)
				}
			})
		}
		running.Go(func() {
			for range 5 {
				got := make([]byte, 8*48<<10)
				var err error
				reader.Load(t.Context(), []tiers.Transfer{{Run: run, Bytes: got}},
					func(_ int, e error) { err = e })
				if err == nil && bytes.Count(got, got[:1]) != len(got) {
					t.Error("a mixture")
				}
				if err != nil && !errors.Is(err, tiers.ErrNotFound) &&
					!errors.Is(err, tiers.ErrCorrupt) {
					t.Error(err)
				}
			}
		})
		running.Wait()
	}
}

// Sidecars with other codecs and splits read each other's chunks where nothing is lost.
func TestCodecsMeet(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	bucket, _ := s3Server(t)
	var ts []*Tier
	for i, codec := range []string{"raw", "lossless", "raw", "int8"} {
		ts = append(ts, openRedis(t, RedisOptions{Addrs: []string{s.addr},
			Password: Secret{File: passwordFile(t)}, Serde: codec, SplitBytes: minSplit << i}))
	}
	for _, codec := range []string{"raw", "lossless"} {
		tier, err := OpenS3(S3Options{DialTimeout: unhurried, Endpoint: "http://" + bucket.addr,
			Bucket: "kv-cache", CredentialsFile: credentialsFile(t, accessKey, password),
			Serde: codec})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { tier.Close() })
		ts = append(ts, tier)
	}
	space := tiertest.NewSpace("codecs", tiers.Geometry{PageBytes: 100_000, PagesPerChunk: 4,
		PageTokens: 16, DigestBytes: 32})
	for i, writer := range ts {
		lossy := writer.Stats().Lossy
		tr := chunkOf(space, byte(i), 2, 3, 4)
		mustStore(t, writer, tr)
		for j, reader := range ts {
			for pages := 1; pages <= 4; pages++ {
				part := tr
				part.Hashes, part.Bytes = part.Hashes[:pages*32], part.Bytes[:pages*100_000]
				got := make([]byte, len(part.Bytes))
				var err error
				reader.Load(t.Context(), []tiers.Transfer{{Run: part.Run, Bytes: got}},
					func(_ int, e error) { err = e })
				same := reader.kind == writer.kind
				switch {
				case !same || lossy && i != j:
					if !errors.Is(err, tiers.ErrNotFound) {
						t.Errorf("%s wrote it, %s reads %v", writer.detail, reader.detail, err)
					}
				case err != nil || !lossy && !bytes.Equal(got, part.Bytes):
					t.Errorf("%s wrote it, %s reads %d pages: %v", writer.detail, reader.detail,
						pages, err)
				}
			}
		}
	}
}

// Prefixes keep tiers apart, also where one begins with another.
func TestPrefixes(t *testing.T) {
	t.Parallel()
	s := redisServer(t)
	bucket, _ := s3Server(t)
	space := tiertest.NewSpace("prefixes", geometry)
	tr := chunkOf(space, 1, 2, 3, 4)
	for _, open := range []func(prefix string) (*Tier, error){
		func(prefix string) (*Tier, error) {
			return OpenRedis(RedisOptions{DialTimeout: unhurried, Addrs: []string{s.addr},
				Password: Secret{File: passwordFile(t)}, Prefix: prefix})
		},
		func(prefix string) (*Tier, error) {
			return OpenS3(S3Options{DialTimeout: unhurried, Endpoint: "http://" + bucket.addr,
				Bucket: "kv-cache", CredentialsFile: credentialsFile(t, accessKey, password),
				Prefix: prefix})
		},
	} {
		var ts []*Tier
		for _, prefix := range []string{"a", "a/b", "a/b/c", "ab"} {
			tier, err := open(prefix)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { tier.Close() })
			if err := load(t.Context(), tier, tr); !errors.Is(err, tiers.ErrNotFound) {
				t.Errorf("%s: %v", prefix, err)
			}
			mustStore(t, tier, tr)
			ts = append(ts, tier)
		}
		for i, tier := range ts {
			if n, err := tier.Clear(t.Context(), tiers.Fingerprint{}); n != 1 || err != nil {
				t.Errorf("%s: Clear: %d, %v", tier.detail, n, err)
			}
			for j, other := range ts {
				if err := load(t.Context(), other, tr); j <= i &&
					!errors.Is(err, tiers.ErrNotFound) || j > i && err != nil {
					t.Errorf("%s: %v after %s was cleared", other.detail, err, tier.detail)
				}
			}
		}
	}
}

// An S3 server that answers anything.
func TestS3Garbage(t *testing.T) {
	t.Parallel()
	tr := chunkOf(tiertest.NewSpace("garbage", geometry), 1, 2, 3)
	flood := func(w http.ResponseWriter, what string, n int) {
		for range n {
			if _, err := io.WriteString(w, what); err != nil {
				return
			}
		}
	}
	for name, h := range map[string]http.HandlerFunc{
		"empty": func(http.ResponseWriter, *http.Request) {},
		"html": func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w,
				"<html><body>Welcome</body></html>")
		},
		"500": func(w http.ResponseWriter,
			_ *http.Request) {
			w.WriteHeader(500)
			io.WriteString(w, "<Error><Code>")
		},
		"endless": func(w http.ResponseWriter, _ *http.Request) {
			flood(w,
				strings.Repeat("x", 1<<16), 1<<12)
		},
		"endless 500": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(500)
			flood(w, strings.Repeat("x", 1<<16), 1<<12)
		},
		"endless list": func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "<ListBucketResult><IsTruncated>true</IsTruncated>")
			flood(w, "<Contents><Key>la1/x</Key></Contents>", 1<<22)
		},
		"deep": func(w http.ResponseWriter, _ *http.Request) { flood(w, "<a>", 1<<20) },
		"half": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "1000000")
			io.WriteString(w, "x")
		},
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.String(), http.StatusTemporaryRedirect)
		},
		"empty list": func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "<ListBucketResult>")
			flood(w, "<Contents />", 1<<22)
		},
		"attributes": func(w http.ResponseWriter, _ *http.Request) {
			io.WriteString(w, "<ListBucketResult")
			flood(w, " a='b'", 1<<22)
		},
		"not found": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(404)
			io.WriteString(w, "<Error><Code>NoSuchKey</Code></Error>")
		},
		"listing without end": func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken><Contents><Key>la1/x</Key></Contents></ListBucketResult>")
		},
	} {
		s := httptest.NewServer(h)
		tier, err := OpenS3(S3Options{DialTimeout: unhurried, Endpoint: s.URL, Bucket: "kv-cache",
			Region: "us-east-1"})
		if err != nil {
			t.Fatal(err)
		}
		for call := range everyCallUnder(t, 300*time.Millisecond, tier, tr) {
			if call.name == "Load" && call.err == nil {
				t.Errorf("%s: a load is a hit", name)
			}
			if call.err != nil && len(call.err.Error()) > 600 {
				t.Errorf("%s: %s: an error of %d bytes", name, call.name, len(call.err.Error()))
			}
		}
		tier.Close()
		s.CloseClientConnections()
		s.Close()
	}
}
