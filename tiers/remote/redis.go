package remote

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"
	"github.com/redis/go-redis/v9/maintnotifications"

	"lookaside/tiers"
)

// An object in Redis is several keys: PREFIX/SPACE/FIRST/{LAST}-PAGES has the header, and the same
// with /0, /1, … behind it the encoded pages in parts. The braces make a cluster keep all of one
// object on one node, and spread the objects that begin alike. PREFIX/SPACE/FIRST is a sorted set
// of the names of the newest objects that begin with the page FIRST, by the time of their storing.
const (
	maxIndex  = 256  // entries of an index
	scanCount = 1000 // keys looked at by one SCAN
	// A value is read in pieces, several at once. For a reply of many MiB a server allocates fresh
	// memory each time, at twice the processor time (measured with Redis 7, on values from 256 KiB
	// to 32 MiB).
	pieceBytes  = 256 << 10
	windowBytes = 4 << 20
	// streams is how many chunks of one call are moved at a time, each on a connection of its own.
	// While one waits for the server, another computes checksums.
	streams = 2
)

type redisObjects struct {
	client  redis.UniversalClient
	o       RedisOptions
	cluster bool
	secrets secrets
	replies atomic.Int64 // see guard.all
}

// OpenRedis makes a tier of a Redis service. It sends the server nothing; Check does. It returns an
// error for wrong options or unreadable files.
func OpenRedis(o RedisOptions) (*Tier, error) {
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("redis: %w", err)
	}
	r := &redisObjects{o: o, cluster: o.Mode == RedisCluster}
	sentinelPassword, err := o.SentinelPassword.read()
	if err != nil {
		return nil, fmt.Errorf("redis: sentinel's password: %w", err)
	}
	if _, err := o.Password.read(); err != nil {
		return nil, fmt.Errorf("redis: password: %w", err)
	}
	r.secrets.add(sentinelPassword)
	var conf *tls.Config
	if o.TLS {
		if conf, err = o.Files.config(); err != nil {
			return nil, fmt.Errorf("redis: %w", err)
		}
	}
	logging.Disable() // it would write to standard error
	r.client = redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs:            o.Addrs,
		MasterName:       o.Master,
		IsClusterMode:    r.cluster,
		DB:               o.DB,
		SentinelUsername: o.SentinelUser,
		SentinelPassword: sentinelPassword,
		CredentialsProviderContext: func(context.Context) (string, string, error) {
			p, err := o.Password.read()
			r.secrets.add(p)
			return o.User, p, err
		},
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return r.dial(ctx, network, addr, conf)
		},
		Protocol:                 2, // no push messages
		DisableIdentity:          true,
		ClientName:               "lookaside",
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		MaxRetries:               -1, // package stack decides
		DialerRetries:            1,
		DialTimeout:              o.DialTimeout,
		ReadTimeout:              -1, // every context has a deadline
		WriteTimeout:             -1,
		ContextTimeoutEnabled:    true,
		PoolSize:                 o.Pool,
		MaxActiveConns:           o.Pool,
		PipelinePoolSize:         -1, // every command is pipelined, so one pool is enough
		PoolTimeout:              patience,
	})
	return newTier("redis", o.detail(), o.Serde, r), nil
}

func (o *RedisOptions) detail() string {
	var b strings.Builder
	b.WriteString(strings.Join(o.Addrs, ","))
	switch o.Mode {
	case RedisSentinel:
		fmt.Fprintf(&b, " (sentinels of %s)", o.Master)
	case RedisCluster:
		b.WriteString(" (cluster)")
	}
	if o.DB != 0 {
		fmt.Fprintf(&b, ", database %d", o.DB)
	}
	if o.TLS {
		b.WriteString(", TLS")
	}
	fmt.Fprintf(&b, ", prefix %s, %s", o.Prefix, o.Serde)
	if o.TTL > 0 {
		fmt.Fprintf(&b, ", ttl %v", o.TTL)
	}
	return b.String()
}

// config returns the TLS configuration with these files.
func (f TLSFiles) config() (*tls.Config, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if f.CA != "" {
		pem, err := os.ReadFile(f.CA)
		if err != nil {
			return nil, fmt.Errorf("ca_file: %w", err)
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("ca_file: no certificate in %s", f.CA)
		}
	}
	if (f.Cert == "") != (f.Key == "") {
		return nil, errors.New("cert_file and key_file: set both or neither")
	}
	if f.Cert != "" {
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return nil, fmt.Errorf("cert_file, key_file: %w", err)
		}
		conf.Certificates = []tls.Certificate{pair}
	}
	return conf, nil
}

func (r *redisObjects) dial(ctx context.Context, network, addr string,
	conf *tls.Config) (net.Conn, error) {
	if strings.HasPrefix(addr, "/") {
		network = "unix"
	}
	d := net.Dialer{Timeout: r.o.DialTimeout, KeepAlive: time.Minute}
	var conn net.Conn
	var err error
	if conf == nil {
		conn, err = d.DialContext(ctx, network, addr)
	} else {
		ctx, cancel := context.WithTimeout(ctx, r.o.DialTimeout)
		defer cancel()
		if conn, err = (&tls.Dialer{NetDialer: &d, Config: conf}).DialContext(ctx, network,
			addr); err != nil {
			err = fmt.Errorf("tls: %w", err)
		}
	}
	if err != nil {
		return nil, err
	}
	return &guard{Conn: conn, all: &r.replies, maxValue: max(pieceBytes, int64(maxHeaderBytes))},
		nil
}

// index returns the key of the index of objects that begin with a name's first page.
func (r *redisObjects) index(space *tiers.Space, first string) []byte {
	b := make([]byte, 0, 384)
	b = append(append(b, r.o.Prefix...), '/')
	b = append(hex.AppendEncode(b, space.Fingerprint[:]), '/')
	return hex.AppendEncode(b, []byte(first))
}

// root returns the key of an object's header.
func (r *redisObjects) root(n name) []byte {
	b := append(r.index(n.space, n.first), '/', '{')
	b = append(hex.AppendEncode(b, []byte(n.last)), '}', '-')
	return strconv.AppendInt(b, int64(n.pages), 10)
}

func partOf(root []byte, i int64) []byte {
	return strconv.AppendInt(append(root[:len(root):len(root)], '/'), i, 10)
}

// parseRoot parses the object's name from the part behind the index's key and a slash.
func parseRoot(run tiers.Run, s string) (name, bool) {
	last, ok := strings.CutPrefix(s, "{")
	last, pages, ok2 := strings.Cut(last, "}")
	if !ok || !ok2 {
		return name{}, false
	}
	return parseName(run, last+pages)
}

// send sends a pipeline. It returns the error of the connection. Each command has its own error:
// the server's reply, or that there was none.
func send(ctx context.Context, p redis.Pipeliner) error {
	cmds := p.Cmds()
	if len(cmds) == 0 {
		return nil
	}
	err := context.Cause(ctx)
	if err == nil {
		_, err = p.Exec(ctx)
	}
	if err == nil {
		return nil
	}
	if !slices.ContainsFunc(cmds, func(c redis.Cmder) bool { return c.Err() != nil }) {
		for _, c := range cmds { // nothing was sent
			c.SetErr(err)
		}
		return err
	}
	var answer redis.Error
	if errors.As(err, &answer) {
		return nil
	}
	return err
}

func (r *redisObjects) has(ctx context.Context, names []name, there []bool) error {
	p := r.client.Pipeline()
	answers := make([]*redis.IntCmd, len(names))
	for i, n := range names {
		answers[i] = r.exists(ctx, p, n)
	}
	if err := send(ctx, p); err != nil {
		return err
	}
	for i, a := range answers {
		n, err := a.Result()
		if err != nil {
			return err
		}
		there[i] = n == 2
	}
	return nil
}

// exists requests whether an object's header and first part exist. The result is 2 if both do.
func (r *redisObjects) exists(ctx context.Context, p redis.Pipeliner, n name) *redis.IntCmd {
	root := r.root(n)
	cmd := redis.NewIntCmd(ctx, "exists", root, partOf(root, 0))
	_ = p.Process(ctx, cmd)
	return cmd
}

func (r *redisObjects) variants(ctx context.Context, runs []tiers.Run,
	look look) ([][]variant, error) {
	out := make([][]variant, len(runs))
	for from := 0; from < len(runs); {
		p := r.client.Pipeline()
		to := from
		var answers [][]*redis.IntCmd
		var indexes []*redis.StringSliceCmd
		for ; to < len(runs) && p.Len() < window; to++ {
			run := runs[to]
			var begins []*redis.IntCmd
			from := 1
			if look == lookForStore { // the others are in the index, or nobody looks for them
				from = run.Pages()
			}
			for pages := from; pages <= run.Pages(); pages++ {
				begins = append(begins, r.exists(ctx, p, nameOf(run, pages)))
			}
			answers = append(answers, begins)
			var index *redis.StringSliceCmd
			if run.Space.Geometry.PagesPerChunk > 1 && look != lookForAll {
				index = redis.NewStringSliceCmd(ctx, "zrevrange",
					r.index(run.Space, nameOf(run, 1).first), 0, maxVariants-1)
				_ = p.Process(ctx, index)
			}
			indexes = append(indexes, index)
		}
		if err := send(ctx, p); err != nil {
			return nil, err
		}
		for i, begins := range answers {
			run := runs[from+i]
			for k, a := range begins {
				n, err := a.Result()
				if err != nil {
					return nil, err
				}
				if n == 2 {
					out[from+i] = append(out[from+i],
						variant{nameOf(run, run.Pages()-len(begins)+k+1), true})
				}
			}
			if indexes[i] == nil {
				continue
			}
			members, err := indexes[i].Result()
			if err != nil {
				return nil, err
			}
			for _, m := range members {
				if n, ok := parseName(run, m); ok && !slices.Contains(out[from+i],
					variant{n, true}) {
					out[from+i] = append(out[from+i], variant{n, false})
				}
			}
		}
		from = to
	}
	if look != lookForAll {
		return out, nil
	}
	for i, run := range runs {
		if run.Pages() == run.Space.Geometry.PagesPerChunk {
			continue // nothing is longer
		}
		prefix := string(append(r.index(run.Space, nameOf(run, 1).first), '/'))
		err := r.scan(ctx, prefix+"*", func(keys []string) error {
			for _, k := range keys {
				if n, ok := parseRoot(run, strings.TrimPrefix(k, prefix)); ok &&
					n.pages > run.Pages() {
					if len(out[i]) == maxVariantNames {
						return errTooLong
					}
					out[i] = append(out[i], variant{n, true})
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// scan calls do for the keys of all nodes that match a pattern. A key may come twice.
func (r *redisObjects) scan(ctx context.Context, pattern string,
	do func(keys []string) error) error {
	one := func(ctx context.Context, c redis.UniversalClient) error {
		for cursor := uint64(0); ; {
			keys, next, err := c.Scan(ctx, cursor, pattern, scanCount).Result()
			if err == nil {
				err = do(keys)
			}
			if err == nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			if err != nil || next == 0 {
				return err
			}
			cursor = next
		}
	}
	c, ok := r.client.(*redis.ClusterClient)
	if !ok {
		return one(ctx, r.client)
	}
	// One call at a time: do is not safe for concurrent use.
	turn := make(chan struct{}, 1)
	return c.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error {
		turn <- struct{}{}
		defer func() { <-turn }()
		return one(ctx, c)
	})
}

// rangeCmd is a request for bytes of a value.
type rangeCmd struct {
	cmd  *redis.ZeroCopyStringCmd
	want int
}

// getRange requests bytes of a value, to be read into b and nowhere else. A missing value gives 0
// bytes.
func getRange(ctx context.Context, p redis.Pipeliner, key []byte, from int64, b []byte) rangeCmd {
	cmd := redis.NewZeroCopyStringCmd(ctx, b, "getrange", key, from, from+int64(len(b))-1)
	_ = p.Process(ctx, cmd)
	return rangeCmd{cmd, len(b)}
}

func (c rangeCmd) err() error {
	switch n, err := c.cmd.Result(); {
	case err != nil:
		return err
	case n == 0:
		return tiers.ErrNotFound
	case n != c.want:
		return fmt.Errorf("%w: a value of %d bytes, want %d", tiers.ErrCorrupt, n, c.want)
	}
	return nil
}

func (r *redisObjects) headers(ctx context.Context, names []name, each func(i int, b []byte,
	err error)) {
	for from := 0; from < len(names); from += maxVariants {
		group := names[from:min(from+maxVariants, len(names))]
		p := r.client.Pipeline()
		answers, bufs := make([]rangeCmd, len(group)), make([][]byte, len(group))
		for i, n := range group {
			bufs[i] = make([]byte, headerBytes(n.pages, n.space.Geometry.DigestBytes))
			answers[i] = getRange(ctx, p, r.root(n), 0, bufs[i])
		}
		_ = send(ctx, p)
		prune := r.client.Pipeline()
		for i, a := range answers {
			err := a.err()
			if errors.Is(err, tiers.ErrNotFound) {
				r.unlist(ctx, prune, group[i])
			}
			each(from+i, bufs[i], err)
		}
		_ = send(ctx, prune) // it only keeps the index small
	}
}

// unlist removes a name from its index.
func (r *redisObjects) unlist(ctx context.Context, p redis.Pipeliner, n name) {
	_ = p.Process(ctx, redis.NewIntCmd(ctx, "zrem", r.index(n.space, n.first), n.append(nil)))
}

// reading is a chunk whose header has been read.
type reading struct {
	f      *fetch
	stream []byte
	err    error // of the pieces so far
}

func (r *redisObjects) fetch(ctx context.Context, fetches []*fetch) {
	names := make([]name, len(fetches))
	for i, f := range fetches {
		names[i] = f.name
	}
	var units [][]reading // of windowBytes, or one chunk
	size := 0
	r.headers(ctx, names, func(i int, b []byte, err error) {
		f := fetches[i]
		var stream []byte
		if err == nil {
			stream, err = f.begin(b)
		}
		if err == nil && f.h.partBytes == 0 {
			err = fmt.Errorf("%w: not in parts", tiers.ErrCorrupt)
		}
		if err != nil {
			f.end(err)
			return
		}
		if size += len(stream); len(units) == 0 || size > windowBytes {
			units, size = append(units, nil), len(stream)
		}
		last := &units[len(units)-1]
		*last = append(*last, reading{f: f, stream: stream})
	})
	inParallel(len(units), streams, func(i int) { r.read(ctx, units[i]) })
}

// read reads the pages of chunks, a window at a time.
func (r *redisObjects) read(ctx context.Context, unit []reading) {
	p := r.client.Pipeline()
	var asked []rangeCmd
	var of []*reading
	size := int64(0)
	flush := func() {
		_ = send(ctx, p)
		for i, c := range asked {
			if err := c.err(); of[i].err == nil {
				of[i].err = err
			}
		}
		asked, of, size = asked[:0], of[:0], 0
		p = r.client.Pipeline()
	}
	for i := range unit {
		g := &unit[i]
		root := r.root(g.f.name)
		for at := int64(0); at < int64(len(g.stream)) && g.err == nil; {
			part, from := at/g.f.h.partBytes, at%g.f.h.partBytes
			n := min(int64(len(g.stream))-at, g.f.h.partBytes-from, pieceBytes)
			asked, of = append(asked, getRange(ctx, p, partOf(root, part), from,
				g.stream[at:at+n])), append(of, g)
			at += n
			if size += n; size >= windowBytes {
				flush()
			}
		}
	}
	flush()
	for _, g := range unit {
		if errors.Is(g.err, tiers.ErrNotFound) { // evicted in part
			_ = r.remove(ctx, []name{g.f.name})
		}
		g.f.end(g.err)
	}
}

func (r *redisObjects) put(ctx context.Context, puts []*put) {
	inParallel(len(puts), streams, func(i int) { puts[i].end(r.putOne(ctx, puts[i])) })
}

// lazy is a value that is made each time it is written to the connection.
type lazy func() []byte

// MarshalBinary implements encoding.BinaryMarshaler, which go-redis calls.
func (l lazy) MarshalBinary() ([]byte, error) { return l(), nil }

func (r *redisObjects) putOne(ctx context.Context, w *put) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	stream, err := w.begin()
	if err != nil {
		return err
	}
	p := r.client.TxPipeline()
	set := func(key []byte, value any) {
		args := []any{"set", key, value}
		if r.o.TTL > 0 {
			args = append(args, "px", r.o.TTL.Milliseconds())
		}
		_ = p.Process(ctx, redis.NewStatusCmd(ctx, args...))
	}
	root := r.root(w.name)
	for at, part := int64(0), int64(0); at < int64(len(stream)); part++ {
		from, to := at, min(at+r.o.SplitBytes, int64(len(stream)))
		set(partOf(root, part), lazy(func() []byte {
			w.sum(min(to, int64(len(w.src))))
			return stream[from:to]
		}))
		at = to
	}
	set(root, lazy(func() []byte { return w.header(r.o.SplitBytes) }))
	if !r.cluster {
		r.list(ctx, p, w.name)
	}
	cmds := p.Cmds()
	if _, err := p.Exec(ctx); err != nil {
		for _, c := range cmds { // their errors say more than the transaction's
			if e := c.Err(); e != nil && !strings.Contains(e.Error(), "EXECABORT") {
				return e
			}
		}
		return err
	}
	if r.cluster { // the index is on another node
		p := r.client.Pipeline()
		r.list(ctx, p, w.name)
		_ = send(ctx, p) // without it the chunk is found by its name
	}
	return nil
}

// list adds a name to its index.
func (r *redisObjects) list(ctx context.Context, p redis.Pipeliner, n name) {
	if n.space.Geometry.PagesPerChunk == 1 {
		return
	}
	index := r.index(n.space, n.first)
	_ = p.Process(ctx, redis.NewIntCmd(ctx, "zadd", index, time.Now().UnixMilli(), n.append(nil)))
	_ = p.Process(ctx, redis.NewIntCmd(ctx, "zremrangebyrank", index, 0, -maxIndex-1))
	if r.o.TTL > 0 {
		_ = p.Process(ctx, redis.NewIntCmd(ctx, "pexpire", index, r.o.TTL.Milliseconds()))
	}
}

func (r *redisObjects) remove(ctx context.Context, names []name) error {
	var err error
	p := r.client.Pipeline()
	var removals []*redis.IntCmd
	// The header says how many parts there are. Without a header, remove those that we would have
	// made.
	r.headers(ctx, names, func(i int, b []byte, herr error) {
		n := names[i]
		size, partBytes := int64(n.pages)*n.space.Geometry.PageBytes, r.o.SplitBytes
		if herr != nil && !errors.Is(herr, tiers.ErrNotFound) &&
			!errors.Is(herr, tiers.ErrCorrupt) {
			var answer redis.Error
			if !errors.As(herr, &answer) {
				// an error reply is for a key of another type, which is removed too
				err = herr
				return
			}
		}
		if h, perr := parseHeader(b); herr == nil && perr == nil && h.partBytes > 0 &&
			n.verify(h) == nil {
			size, partBytes = h.bytes(h.pages), h.partBytes
		}
		root := r.root(n)
		args := []any{"unlink", root}
		for part := int64(0); part*partBytes < size; part++ {
			args = append(args, partOf(root, part))
		}
		cmd := redis.NewIntCmd(ctx, args...)
		_ = p.Process(ctx, cmd)
		removals = append(removals, cmd)
		if n.space.Geometry.PagesPerChunk > 1 {
			r.unlist(ctx, p, n)
		}
	})
	if err == nil {
		err = send(ctx, p)
	}
	for _, cmd := range removals {
		if err == nil {
			err = cmd.Err()
		}
	}
	return err
}

func (r *redisObjects) clear(ctx context.Context, fp tiers.Fingerprint) (int, error) {
	prefix := r.o.Prefix + "/"
	if fp != (tiers.Fingerprint{}) {
		prefix += fp.String() + "/"
	}
	n := 0
	err := r.scan(ctx, prefix+"*", func(keys []string) error {
		p := r.client.Pipeline()
		var removals []*redis.IntCmd
		var headers []bool
		for _, k := range keys {
			// Remove only keys of our form: another service's prefix may begin with ours.
			space, rest, _ := strings.Cut(strings.TrimPrefix(k, r.o.Prefix+"/"), "/")
			if b, err := hex.DecodeString(space); err != nil || len(b) != len(fp) {
				continue
			}
			cmd := redis.NewIntCmd(ctx, "unlink", k)
			_ = p.Process(ctx, cmd)
			_, last, ok := strings.Cut(rest, "/{")
			removals, headers = append(removals, cmd), append(headers, ok &&
				!strings.Contains(last, "/"))
		}
		if err := send(ctx, p); err != nil {
			return err
		}
		for i, cmd := range removals {
			gone, err := cmd.Result()
			if err != nil {
				return err
			}
			if headers[i] {
				n += int(gone)
			}
		}
		return nil
	})
	return n, err
}

func (r *redisObjects) check(ctx context.Context) error {
	// Not PING: some servers reply to it without a password.
	err := r.client.Exists(ctx, r.o.Prefix+"/check").Err()
	if err == nil && r.cluster {
		err = r.client.(*redis.ClusterClient).ForEachMaster(ctx, func(ctx context.Context,
			c *redis.Client) error {
			return c.Ping(ctx).Err()
		})
	}
	return err
}

func (r *redisObjects) explain(err error) error {
	if errors.Is(err, redis.ErrClosed) {
		return tiers.ErrClosed
	}
	text := err.Error()
	has := func(words ...string) bool {
		for _, w := range words {
			if strings.Contains(text, w) {
				return true
			}
		}
		return false
	}
	shown := r.secrets.scrub(text)
	switch {
	case has("OOM command not allowed"):
		return fmt.Errorf("%w: redis at %s is full and evicts nothing: raise its maxmemory, or set its maxmemory-policy to allkeys-lru", tiers.ErrBusy, r.o.detail())
	case has("WRONGPASS", "invalid password", "invalid username-password"):
		return fmt.Errorf("redis at %s refuses the password: look at password_file or password_env, and at the user in url: %s", r.o.detail(), shown)
	case has("NOAUTH"):
		return fmt.Errorf("redis at %s wants a password: set password_file or password_env: %s",
			r.o.detail(), shown)
	case has("without any password configured"):
		return fmt.Errorf("redis at %s has no password for this user: unset password_file and password_env, or look at the user in url: %s", r.o.detail(), shown)
	case has("NOPERM"):
		return fmt.Errorf("redis at %s does not let the user in url do this: it needs +@read +@write +@keyspace +@transaction on %s/*: %s", r.o.detail(), r.o.Prefix, shown)
	case has("x509:", "tls:"):
		return fmt.Errorf("redis at %s: TLS: look at ca_file, cert_file and key_file, and whether url should say rediss: %s", r.o.detail(), shown)
	}
	return fmt.Errorf("redis at %s: %s", r.o.detail(), shown)
}

func (r *redisObjects) close() { _ = r.client.Close() }
