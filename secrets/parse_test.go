package secrets

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// pair is a credential in the open, for comparison.
type pair struct{ User, Password string }

func pairs(entries []entry) []pair {
	var all []pair
	for _, e := range entries {
		all = append(all, pair{e.credential.Username, e.credential.Password.Reveal()})
	}
	return all
}

func messages(problems []Problem) string {
	var all []string
	for _, p := range problems {
		all = append(all, p.Message)
	}
	return strings.Join(all, "; ")
}

func b64(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }

// What the kubelet makes of each entry; where kip differs the name says so.
func TestOneEntry(t *testing.T) {
	serviceAccount := "{\n\"type\": \"service_account\",\n\"private_key\": \"-----BEGIN\\n" + strings.Repeat("k:", 1100) + "\"\n}\n"
	longToken := strings.Repeat("eyJ", 700) + "="
	for name, test := range map[string]struct {
		body    string
		want    *pair
		problem string // part of the one problem; empty for none
	}{
		"auth is user and password":                        {`{"auth":"dTpw"}`, &pair{"u", "p"}, ""},
		"auth may lack its padding":                        {`{"auth":"dTpwdw"}`, &pair{"u", "pw"}, ""},
		"auth may be padded":                               {`{"auth":"dTpwdw=="}`, &pair{"u", "pw"}, ""},
		"a newline after the padding is skipped":           {`{"auth":"dTpwdw==\n"}`, &pair{"u", "pw"}, ""},
		"two newlines after the padding are skipped":       {`{"auth":"dTpwdw==\n\n"}`, &pair{"u", "pw"}, ""},
		"a newline within is skipped":                      {`{"auth":"dT\r\npwdw=="}`, &pair{"u", "pw"}, ""},
		"kip trims a space before auth and warns":          {`{"auth":" dTpw"}`, &pair{"u", "p"}, "white space"},
		"kip trims a space after auth and warns":           {`{"auth":"dTpwdw== "}`, &pair{"u", "pw"}, "white space"},
		"only the first colon splits":                      {`{"auth":"dTpwOnc6eA=="}`, &pair{"u", "p:w:x"}, ""},
		"a newline that ends the password stays and warns": {`{"auth":"dTpwCg=="}`, &pair{"u", "p\n"}, "ends in a newline"},
		"so does one in the plain field":                   {`{"username":"u","password":"p\n"}`, &pair{"u", "p\n"}, "ends in a newline"},
		"a NUL stays":                                      {`{"auth":"dTpwAA=="}`, &pair{"u", "p\x00"}, ""},
		"the password may be empty":                        {`{"auth":"dTo="}`, &pair{"u", ""}, ""},
		"the user may be empty":                            {`{"auth":"OnA="}`, &pair{"", "p"}, ""},
		"both may be empty, which means anonymous":         {`{"auth":"Og=="}`, &pair{"", ""}, ""},
		"auth without a colon is dropped":                  {`{"auth":"bm9jb2xvbg=="}`, nil, "no colon"},
		"auth that is no base64 is dropped":                {`{"auth":"!!!"}`, nil, "not base64"},
		"auth that is a number is dropped":                 {`{"auth":123}`, nil, `"auth" is or holds a JSON number`},
		"auth that is an object is dropped":                {`{"auth":{"a":"b"}}`, nil, `"auth" is or holds a JSON object`},
		"a password that is a number is dropped":           {`{"username":"u","password":12345}`, nil, `"password" is or holds a JSON number`},
		"email of a wrong type is dropped":                 {`{"auth":"dTpw","email":[]}`, nil, `"email" is or holds a JSON array`},
		"auth in plain text is explained":                  {`{"auth":"u:p"}`, nil, "plain text"},
		"auth of spaces is dropped":                        {`{"auth":"  "}`, nil, "no colon"},
		"kip takes URL-safe base64 and warns":              {`{"auth":"dTr__vs="}`, &pair{"u", "\xff\xfe\xfb"}, "URL-safe"},
		"an empty auth leaves the plain fields":            {`{"auth":"","username":"u","password":"p"}`, &pair{"u", "p"}, ""},
		"auth wins over plain fields that differ and warns": {
			`{"auth":"QTpC","username":"u","password":"p"}`, &pair{"A", "B"}, "differ from auth"},
		"auth wins over an old password and warns": {
			`{"username":"u","password":"old","auth":"` + b64("u:new") + `"}`, &pair{"u", "new"}, "differ from auth"},
		"auth beside equal plain fields is no problem":      {`{"auth":"dTpw","username":"u","password":"p"}`, &pair{"u", "p"}, ""},
		"a bad auth is not replaced by the plain fields":    {`{"auth":"!!!","username":"u","password":"p"}`, nil, "not base64"},
		"username and password do without auth":             {`{"username":"u","password":"p"}`, &pair{"u", "p"}, ""},
		"a user alone has an empty password":                {`{"username":"u"}`, &pair{"u", ""}, ""},
		"a password alone has an empty user":                {`{"password":"p"}`, &pair{"", "p"}, ""},
		"an empty entry means anonymous":                    {`{}`, &pair{"", ""}, ""},
		"null means anonymous":                              {`null`, &pair{"", ""}, ""},
		"a null auth leaves the plain fields":               {`{"auth":null,"username":"u"}`, &pair{"u", ""}, ""},
		"field names have no letter case":                   {`{"AUTH":"dTpw"}`, &pair{"u", "p"}, ""},
		"nor have those of the plain pair":                  {`{"Username":"u","Password":"p","Email":"e"}`, &pair{"u", "p"}, ""},
		"an entry that is text is dropped":                  {`"dTpw"`, nil, "entry is or holds a JSON string"},
		"an entry that is a list is dropped":                {`["u","p"]`, nil, "entry is or holds a JSON array"},
		"a user that ends where a $ stood is explained":     {`{"username":"robot","password":"p"}`, &pair{"robot", "p"}, "expanded by a shell"},
		"a spoiled service account is explained":            {`{"username":"_json_key","password":"{\"a\":"}`, &pair{"_json_key", `{"a":`}, "not JSON"},
		"a service account's JSON is kept byte by byte":     {`{"auth":"` + b64("_json_key:"+serviceAccount) + `"}`, &pair{"_json_key", serviceAccount}, "ends in a newline"},
		"a dollar sign is not expanded":                     {`{"auth":"` + b64("robot$team+pull:$HOME${x}") + `"}`, &pair{"robot$team+pull", "$HOME${x}"}, ""},
		"a long token that ends in an equals sign is whole": {`{"auth":"` + b64("AWS:"+longToken) + `"}`, &pair{"AWS", longToken}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			const neighbours = `{"auths":{"a.io":{"auth":"dTpw"},"r.io":%s,"z.io":{"auth":"dTpw"}}}`
			entries, problems := parseDockerConfigJSON(fmt.Appendf(nil, neighbours, test.body))
			want := []pair{{"u", "p"}}
			if test.want != nil {
				want = append(want, *test.want)
			}
			if diff := cmp.Diff(append(want, pair{"u", "p"}), pairs(entries)); diff != "" {
				t.Errorf("credentials (-want +got):\n%s", diff)
			}
			switch {
			case test.problem == "" && len(problems) > 0:
				t.Errorf("unexpected problem: %s", messages(problems))
			case test.problem != "" && (len(problems) != 1 || problems[0].Key != "r.io" || !strings.Contains(problems[0].Message, test.problem)):
				t.Errorf("problems %v, want one on r.io with %q", problems, test.problem)
			}
		})
	}
}

// What docker, but not the kubelet, finds in an entry (credentials specification, section 2).
func TestTokensAndHelpers(t *testing.T) {
	type want struct {
		Kind           Kind
		User, Password string
		Note           bool
	}
	const acr = "00000000-0000-0000-0000-000000000000:"
	for name, test := range map[string]struct {
		body, file string // file is what stands beside auths
		want       []want
		problem    string
	}{
		"an identity token wins over a user without a password": {`{"auth":"` + b64(acr) + `","identitytoken":"RT"}`, "", []want{{IdentityToken, "", "RT", true}}, "holds a token"},
		"an identity token alone":                               {`{"identitytoken":"RT"}`, "", []want{{IdentityToken, "", "RT", true}}, "holds a token"},
		"a user and a password come after it":                   {`{"auth":"dTpw","identitytoken":"RT"}`, "", []want{{IdentityToken, "", "RT", true}, {Password, "u", "p", false}}, "holds a token"},
		"the user <token> marks one":                            {`{"username":"<token>","password":"RT"}`, "", []want{{IdentityToken, "", "RT", true}}, "holds a token"},
		"also in auth":                                          {`{"auth":"` + b64("<token>:RT") + `"}`, "", []want{{IdentityToken, "", "RT", true}}, "holds a token"},
		"a secret without a user is one, to CRI too":            {`{"auth":"` + b64(":RT") + `"}`, "", []want{{IdentityToken, "", "RT", false}}, ""},
		"a registry token":                                      {`{"registrytoken":"T"}`, "", []want{{RegistryToken, "", "T", true}}, "holds a token"},
		"both tokens":                                           {`{"registrytoken":"T","identitytoken":"RT"}`, "", []want{{RegistryToken, "", "T", true}, {IdentityToken, "", "RT", true}}, "holds a token"},
		"a token of a wrong type is none":                       {`{"auth":"dTpw","identitytoken":7}`, "", []want{{Password, "u", "p", false}}, ""},
		"an empty entry is anonymous":                           {`{}`, "", []want{{Anonymous, "", "", false}}, ""},
		"but not beside a helper for it":                        {`{}`, `,"credHelpers":{"r.io":"gcloud"}`, nil, "credential helper"},
		"nor beside a store":                                    {`{}`, `,"credsStore":"desktop"`, nil, "credential helper"},
		"a helper for another key is none for this":             {`{}`, `,"credHelpers":{"s.io":"gcloud"}`, []want{{Anonymous, "", "", false}}, ""},
		"a login beside a store is used":                        {`{"auth":"dTpw"}`, `,"credsStore":"desktop"`, []want{{Password, "u", "p", false}}, ""},
		"helpers of a wrong type cost nothing":                  {`{"auth":"dTpw"}`, `,"credsStore":7`, []want{{Password, "u", "p", false}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			entries, problems := parseDockerConfigJSON([]byte(`{"auths":{"r.io":` + test.body + `}` + test.file + `}`))
			var got []want
			for _, e := range entries {
				c := e.credential
				got = append(got, want{c.Kind(), c.Username, c.Password.Reveal(), c.Note != ""})
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("credentials (-want +got):\n%s", diff)
			}
			if (test.problem == "") != (len(problems) == 0) || !strings.Contains(messages(problems), test.problem) {
				t.Errorf("problems %v, want %q", problems, test.problem)
			}
		})
	}
}

func TestOneFile(t *testing.T) {
	good := []pair{{"u", "p"}}
	for name, test := range map[string]struct {
		data    string
		want    []pair
		problem string
	}{
		"an empty object has no entries":                        {`{}`, nil, ""},
		"null has no entries":                                   {`null`, nil, ""},
		"null auths have no entries":                            {`{"auths":null}`, nil, ""},
		"empty auths have no entries":                           {`{"auths":{}}`, nil, ""},
		"a flat map is taken and says so":                       {`{"r.io":{"auth":"dTpw"}}`, good, "flat map in a dockerconfigjson"},
		"a flat map of plain pairs too":                         {`{"r.io":{"Username":"u","password":"p"}}`, good, "flat map in a dockerconfigjson"},
		"helpers alone are not run":                             {`{"auths":{},"credsStore":"desktop"}`, nil, "helpers are not run"},
		"a helper for a host neither":                           {`{"credHelpers":{"r.io":"gcloud"}}`, nil, "helpers are not run"},
		"helpers beside an entry are ignored":                   {`{"auths":{"r.io":{"auth":"dTpw"}},"credsStore":"desktop"}`, good, ""},
		"unknown fields are ignored":                            {`{"auths":{"r.io":{"auth":"dTpw","x":1}},"plugins":[]}`, good, ""},
		"field names have no letter case":                       {`{"AUTHS":{"r.io":{"auth":"dTpw"}}}`, good, ""},
		"the last of two equal keys wins":                       {`{"auths":{"r.io":{"auth":"QTpC"},"r.io":{"auth":"dTpw"}}}`, good, ""},
		"even if it is empty":                                   {`{"auths":{"r.io":{"auth":"dTpw"},"r.io":{}}}`, []pair{{"", ""}}, ""},
		"two auths are one":                                     {`{"auths":{"a.io":{"auth":"QTpC"}},"auths":{"r.io":{"auth":"dTpw"}}}`, []pair{{"A", "B"}, {"u", "p"}}, ""},
		"a null auths takes back the first":                     {`{"auths":{"r.io":{"auth":"dTpw"}},"auths":null}`, nil, ""},
		"an empty file is broken":                               {``, nil, "the file is empty"},
		"blanks are an empty file":                              {" \n", nil, "the file is empty"},
		"a byte order mark is broken":                           {"\xef\xbb\xbf" + `{"auths":{"r.io":{"auth":"dTpw"}}}`, nil, "byte order mark"},
		"trailing text is broken":                               {`{"auths":{"r.io":{"auth":"dTpw"}}} trailing`, nil, "not valid JSON at byte 36"},
		"a cut file is broken":                                  {`{"auths":{"r.io":{"auth":"dT`, nil, "not valid JSON at byte 28"},
		"base64 text is encoded twice":                          {b64(`{"auths":{"r.io":{"auth":"dTpw"}}}`), nil, "looks base64-encoded twice"},
		"YAML is broken":                                        {"auths:\n  r.io:\n", nil, "not valid JSON at byte 1"},
		"a list is broken":                                      {`[]`, nil, "file is or holds a JSON array"},
		"text is broken":                                        {`"auths"`, nil, "file is or holds a JSON string"},
		"auths that are a list are broken":                      {`{"auths":[{"auth":"dTpw"}]}`, nil, `"auths" is not an object`},
		"auths that are text are broken":                        {`{"auths":"dTpw"}`, nil, `"auths" is not an object`},
		"wrong headers are named":                               {`{"HttpHeaders":{"X":["y"]}}`, nil, `"HttpHeaders" is or holds a JSON array`},
		"wrong headers do not cost kip the entries":             {`{"HttpHeaders":{"X":["y"]},"auths":{"r.io":{"auth":"dTpw"}}}`, good, `"HttpHeaders" is or holds a JSON array`},
		"a key that is no URL costs its entry":                  {`{"auths":{" r.io":{"auth":"QTpC"},"r.io":{"auth":"dTpw"}}}`, good, "not a registry host or URL"},
		"so does one whose path decodes to a broken escape":     {`{"auths":{"r.io/%25zz":{"auth":"QTpC"},"r.io":{"auth":"dTpw"}}}`, good, "not a registry host or URL"},
		"nesting without end is broken":                         {strings.Repeat(`{"auths":`, 20000), nil, "not valid JSON"},
		"an entry nested without end costs nobody else's peace": {`{"auths":{"r.io":` + strings.Repeat("[", 20000), nil, "not valid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			entries, problems := parseDockerConfigJSON([]byte(test.data))
			if diff := cmp.Diff(test.want, pairs(entries)); diff != "" {
				t.Errorf("credentials (-want +got):\n%s", diff)
			}
			if (test.problem == "") != (len(problems) == 0) || len(problems) > 1 || !strings.Contains(messages(problems), test.problem) {
				t.Errorf("problems %v, want %q", problems, test.problem)
			}
		})
	}
}

func TestEntriesKeepTheOrderOfTheFile(t *testing.T) {
	entries, _ := parseDockerConfigJSON([]byte(`{"auths":{"z":{},"b":{},"a":{},"z":{"username":"last"},"m":{}}}`))
	var keys []string
	for _, e := range entries {
		keys = append(keys, e.credential.Key)
	}
	if diff := cmp.Diff([]string{"b", "a", "z", "m"}, keys); diff != "" {
		t.Error(diff)
	}
}

func TestNoProblemQuotesAValue(t *testing.T) {
	secret := b64("u:" + canary)
	for _, data := range []string{
		`{"auths":{"r.io":{"auth":"` + secret + `*"}}}`,
		`{"auths":{"r.io":{"auth":"` + b64(canary) + `"}}}`,
		`{"auths":{"r.io":{"auth":"u:` + canary + `"}}}`,
		`{"auths":{"r.io":{"auth":" ` + secret + `","password":"` + canary + `2"}}}`,
		`{"auths":{"r.io":{"password":["` + canary + `"]}}}`,
		`{"auths":{"r.io":"` + canary + `"}}`,
		`{"auths":"` + canary + `"}`,
		`{"auths":{"https://u:` + canary + `@r.io:x":{}}}`,
		`{"auths":{"https://u:` + canary + `@r.io":{"auth":"!"}}}`,
		`{"HttpHeaders":{"` + canary + `":["` + canary + `"]}}`,
		`{"r.io":{"auth":"` + secret + `"}}`,
		`{"auths":{"r.io":{"auth":"` + secret + `"}}} ` + canary,
		canary, `"` + canary + `"`, secret, "eyJ" + secret,
	} {
		_, problems := parseDockerConfigJSON([]byte(data))
		if len(problems) == 0 {
			t.Errorf("no problem with %s", data)
		}
		for _, p := range problems {
			if found := leaks(p.String()); found != nil {
				t.Errorf("%s shows %q", p, found)
			}
		}
	}
}

func TestAProblemIsOneLineThatNamesThePlace(t *testing.T) {
	p := Problem{Source: "harbor", Key: "https://r.io", File: "/mnt/secrets/harbor/.dockerconfigjson", Message: "auth is not base64"}
	want := `secret harbor: /mnt/secrets/harbor/.dockerconfigjson: auths key "https://r.io": auth is not base64`
	if got := p.String(); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if p.Error() != want {
		t.Errorf("Error gives %s", p.Error())
	}
	odd := Problem{Source: "a\nb", Key: "c\r\nd", File: "/e\u2028f", Message: "g\x1b"}.String()
	if strings.ContainsAny(odd, "\r\n\u2028\x1b") {
		t.Errorf("control characters in %q", odd)
	}
}
